#include "mtp/verify_greedy.h"

#include "launch.h"

namespace mtp::cpu {
namespace {

// The target's choice at a row that is in range.
int64_t target_at(const VerifyGreedyParams& p, int64_t row) {
  return p.target_ids(row / p.target_columns, row % p.target_columns);
}

// The first child of `node` with this token and a row of the target's, or -1. A link outside 1..num_nodes - 1 ends the
// list (node 0 is the root, nobody's child); num_nodes links are followed at the most, so a ring of them ends.
int64_t matching_child(const VerifyGreedyParams& p, int64_t b, int64_t node, int64_t token) {
  int64_t child = p.retrieve_next_token(b, node);
  for (int64_t tried = 0; tried < p.num_nodes && child != 0 && in_range(child, p.num_nodes); ++tried) {
    if (p.draft_ids(b, child) == token && in_range(p.retrieve_index(b, child), p.num_rows)) {
      return child;
    }
    child = p.retrieve_next_sibling(b, child);
  }
  return -1;
}

void verify_greedy_request(const VerifyGreedyParams& p, int64_t b) {
  const int64_t width = p.max_depth + 1;
  int64_t* accept_index = p.accept_index + b * width;
  int64_t* accept_ids = p.accept_ids + b * width;
  std::fill_n(accept_index, width, int64_t{-1});
  std::fill_n(accept_ids, width, int64_t{-1});
  p.num_accepted[b] = 0;
  const int64_t most = std::min(p.max_depth, p.num_nodes - 1);
  int64_t node = 0;
  accept_index[0] = p.retrieve_index(b, 0);
  if (!in_range(accept_index[0], p.num_rows)) {
    return;
  }
  for (int64_t accepted = 0; node >= 0; ++accepted) {
    const int64_t row = p.retrieve_index(b, node);
    const int64_t token = target_at(p, row);
    p.num_accepted[b] = accepted;
    accept_index[accepted] = row;
    accept_ids[accepted] = token;  // the token of the child that is taken next, or the bonus where none is
    node = accepted < most ? matching_child(p, b, node, token) : -1;
  }
}

std::tuple<Tensor, Tensor, Tensor> verify_greedy(Tensor draft_ids, Tensor retrieve_index, Tensor retrieve_next_token,
                                                 Tensor retrieve_next_sibling, Tensor target_ids, int64_t max_depth) {
  VerifyGreedyParams p{};
  p.batch = draft_ids.size(0);
  p.num_nodes = draft_ids.size(1);
  p.num_rows = target_ids.numel();
  p.max_depth = max_depth;
  STD_TORCH_CHECK(p.num_nodes >= 1 && max_depth >= 0, "verify_greedy: expected at least 1 node and a depth of 0");
  p.draft_ids = index_view<2>(draft_ids);
  p.retrieve_index = index_view<2>(retrieve_index);
  p.retrieve_next_token = index_view<2>(retrieve_next_token);
  p.retrieve_next_sibling = index_view<2>(retrieve_next_sibling);
  p.target_columns = std::max<int64_t>(1, target_ids.size(target_ids.dim() - 1));
  if (target_ids.dim() == 1) {
    const IndexView<1> flat = index_view<1>(target_ids);
    p.target_ids = {flat.data, {0, flat.stride[0]}, flat.is_int64};
  } else {
    p.target_ids = index_view<2>(target_ids);
  }
  const int64_t width = max_depth + 1;
  Tensor accept_index = empty_int64({p.batch, width});
  Tensor num_accepted = empty_int64({p.batch});
  Tensor accept_ids = empty_int64({p.batch, width});
  p.accept_index = data<int64_t>(accept_index);
  p.num_accepted = data<int64_t>(num_accepted);
  p.accept_ids = data<int64_t>(accept_ids);
  for_requests(p.batch, width + p.num_nodes, [&p](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      verify_greedy_request(p, b);
    }
  });
  return {accept_index, num_accepted, accept_ids};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "verify_greedy(Tensor draft_ids, Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling,"
      " Tensor target_ids, SymInt max_depth) -> (Tensor accept_index, Tensor num_accepted, Tensor accept_ids)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("verify_greedy", TORCH_BOX(&mtp::cpu::verify_greedy)); }
