#include "mtp/tree_build.h"

#include <cstring>

#include "launch.h"
#include "mtp/ranking.h"

namespace mtp::cpu {
namespace {

struct Scratch {
  std::vector<float> scores;      // [num_candidates]
  std::vector<int64_t> order;     // [num_candidates]
  std::vector<int64_t> node_of;   // [num_candidates]: the node a candidate became, or -1
  std::vector<int64_t> depth;     // [num_nodes]
  std::vector<int64_t> youngest;  // [num_nodes]: the last child linked so far, or -1
};

// The kept candidates of request b, in index order, into p.selected.
void select(const TreeBuildParams& p, int64_t b, Scratch& s) {
  s.scores.resize(static_cast<size_t>(p.num_candidates));
  for (int64_t i = 0; i < p.num_candidates; ++i) {
    s.scores[i] = p.cand_scores(b, i);
  }
  const int64_t kept = p.num_nodes - 1;
  rank_best(s.scores.data(), p.num_candidates, kept, s.order);
  std::sort(s.order.begin(), s.order.begin() + kept);
  std::copy_n(s.order.begin(), kept, p.selected + b * kept);
}

// The node that kept candidate `candidate` hangs under: -1 where its parent is out of range, not before it, or not
// kept.
int64_t parent_node(const TreeBuildParams& p, int64_t b, int64_t candidate, const Scratch& s) {
  const int64_t parent = p.cand_parent(b, candidate);
  if (parent == -1) {
    return 0;
  }
  return in_range(parent, candidate) ? s.node_of[parent] : -1;
}

void tree_build_request(const TreeBuildParams& p, int64_t b, Scratch& s) {
  select(p, b, s);
  const int64_t n = p.num_nodes;
  const int64_t* selected = p.selected + b * (n - 1);
  int64_t* parents = p.parents + b * n;
  bool* mask = p.tree_mask + b * n * n;
  int64_t* next_token = p.retrieve_next_token + b * n;
  int64_t* next_sibling = p.retrieve_next_sibling + b * n;
  std::fill_n(mask, n * n, false);
  std::fill_n(next_token, n, int64_t{-1});
  std::fill_n(next_sibling, n, int64_t{-1});
  s.node_of.assign(static_cast<size_t>(p.num_candidates), -1);
  s.depth.assign(static_cast<size_t>(n), 0);
  s.youngest.assign(static_cast<size_t>(n), -1);
  for (int64_t node = 0; node < n; ++node) {
    const int64_t candidate = node == 0 ? -1 : selected[node - 1];
    const int64_t parent = node == 0 ? -1 : parent_node(p, b, candidate, s);
    if (node > 0) {
      s.node_of[candidate] = node;
    }
    if (parent >= 0) {  // a parent comes before its children, so its row of the mask and its depth are final
      std::memcpy(mask + node * n, mask + parent * n, static_cast<size_t>(n) * sizeof(bool));
      s.depth[node] = s.depth[parent] + 1;
      int64_t& link = s.youngest[parent] < 0 ? next_token[parent] : next_sibling[s.youngest[parent]];
      link = node;
      s.youngest[parent] = node;
    }
    mask[node * n + node] = true;
    parents[node] = parent;
    p.draft_ids[b * n + node] = node == 0 ? p.root_ids(b) : p.cand_ids(b, candidate);
    p.draft_positions[b * n + node] = wrapping_add(p.root_positions(b), s.depth[node]);
    p.retrieve_index[b * n + node] = b * n + node;
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tree_build(
    Tensor root_ids, Tensor cand_scores, Tensor cand_ids, Tensor cand_parent, Tensor root_positions,
    int64_t num_draft_tokens) {
  TreeBuildParams p{};
  p.batch = cand_scores.size(0);
  p.num_candidates = cand_scores.size(1);
  p.num_nodes = num_draft_tokens;
  p.root_ids = index_view<1>(root_ids);
  p.cand_scores = view<float, 2>(cand_scores);
  p.cand_ids = index_view<2>(cand_ids);
  p.cand_parent = index_view<2>(cand_parent);
  p.root_positions = index_view<1>(root_positions);
  const int64_t n = p.num_nodes;
  STD_TORCH_CHECK(n >= 1 && n - 1 <= p.num_candidates, "tree_build: expected 1 to ", p.num_candidates + 1, " tokens");
  Tensor draft_ids = empty_int64({p.batch, n});
  Tensor draft_positions = empty_int64({p.batch, n});
  Tensor parents = empty_int64({p.batch, n});
  Tensor selected = empty_int64({p.batch, n - 1});
  Tensor tree_mask = empty_bool({p.batch, n, n});
  Tensor retrieve_index = empty_int64({p.batch, n});
  Tensor retrieve_next_token = empty_int64({p.batch, n});
  Tensor retrieve_next_sibling = empty_int64({p.batch, n});
  p.draft_ids = data<int64_t>(draft_ids);
  p.draft_positions = data<int64_t>(draft_positions);
  p.parents = data<int64_t>(parents);
  p.selected = data<int64_t>(selected);
  p.tree_mask = data<bool>(tree_mask);
  p.retrieve_index = data<int64_t>(retrieve_index);
  p.retrieve_next_token = data<int64_t>(retrieve_next_token);
  p.retrieve_next_sibling = data<int64_t>(retrieve_next_sibling);
  for_requests(p.batch, p.num_candidates + n * n, [&p](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t b = begin; b < end; ++b) {
      tree_build_request(p, b, scratch);
    }
  });
  return {draft_ids,           draft_positions,      parents, selected, tree_mask, retrieve_index,
          retrieve_next_token, retrieve_next_sibling};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "tree_build(Tensor root_ids, Tensor cand_scores, Tensor cand_ids, Tensor cand_parent, Tensor root_positions,"
      " SymInt num_draft_tokens) -> (Tensor draft_ids, Tensor draft_positions, Tensor parents, Tensor selected,"
      " Tensor tree_mask, Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("tree_build", TORCH_BOX(&mtp::cpu::tree_build)); }
