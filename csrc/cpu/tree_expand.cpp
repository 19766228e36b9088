#include "mtp/tree_expand.h"

#include "launch.h"
#include "mtp/ranking.h"

namespace mtp::cpu {
namespace {

void tree_expand_request(const TreeExpandParams& p, int64_t b, std::vector<int64_t>& order) {
  const int64_t n = p.rows * p.k;
  float* cand_scores = p.cand_scores + b * n;
  int64_t* cand_parent = p.cand_parent + b * n;
  const bool first_step = !p.scores.data || !p.frontier.data;
  for (int64_t row = 0; row < p.rows; ++row) {
    const float score = first_step ? 0.0f : p.scores(b, row);
    const int64_t parent = first_step ? -1 : p.frontier(b, row);
    for (int64_t column = 0; column < p.k; ++column) {
      cand_scores[row * p.k + column] = rank_value(score + p.logprobs(b, row, column));
      cand_parent[row * p.k + column] = parent;
    }
  }
  rank_best(cand_scores, n, p.k, order);
  for (int64_t i = 0; i < p.k; ++i) {
    const int64_t best = order[i];
    p.next_ids[b * p.k + i] = p.token_ids(b, best / p.k, best % p.k);
    p.row_index[b * p.k + i] = best / p.k;
    p.next_scores[b * p.k + i] = cand_scores[best];
    p.next_frontier[b * p.k + i] = wrapping_add(p.cand_offset, best);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tree_expand(Tensor logprobs, Tensor token_ids,
                                                                       int64_t cand_offset,
                                                                       std::optional<Tensor> scores,
                                                                       std::optional<Tensor> frontier) {
  TreeExpandParams p{};
  p.logprobs = view<float, 3>(logprobs);
  p.token_ids = index_view<3>(token_ids);
  p.batch = logprobs.size(0);
  p.rows = logprobs.size(1);
  p.k = logprobs.size(2);
  p.cand_offset = cand_offset;
  STD_TORCH_CHECK(p.rows >= 1, "tree_expand: expected at least 1 row");
  if (scores) {
    p.scores = view<float, 2>(*scores);
  }
  if (frontier) {
    p.frontier = index_view<2>(*frontier);
  }
  Tensor next_ids = empty_int64({p.batch, p.k});
  Tensor row_index = empty_int64({p.batch, p.k});
  Tensor next_scores = empty_float({p.batch, p.k});
  Tensor next_frontier = empty_int64({p.batch, p.k});
  Tensor cand_scores = empty_float({p.batch, p.rows * p.k});
  Tensor cand_parent = empty_int64({p.batch, p.rows * p.k});
  p.next_ids = data<int64_t>(next_ids);
  p.row_index = data<int64_t>(row_index);
  p.next_scores = data<float>(next_scores);
  p.next_frontier = data<int64_t>(next_frontier);
  p.cand_scores = data<float>(cand_scores);
  p.cand_parent = data<int64_t>(cand_parent);
  for_requests(p.batch, p.rows * p.k, [&p](int64_t begin, int64_t end) {
    std::vector<int64_t> order;
    for (int64_t b = begin; b < end; ++b) {
      tree_expand_request(p, b, order);
    }
  });
  return {next_ids, row_index, next_scores, next_frontier, cand_scores, cand_parent};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "tree_expand(Tensor logprobs, Tensor token_ids, SymInt cand_offset, *, Tensor? scores=None, Tensor? "
      "frontier=None)"
      " -> (Tensor next_ids, Tensor row_index, Tensor next_scores, Tensor next_frontier, Tensor cand_scores,"
      " Tensor cand_parent)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("tree_expand", TORCH_BOX(&mtp::cpu::tree_expand)); }
