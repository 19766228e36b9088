#include "mtp/verify_sample.h"

#include "heads.h"
#include "mtp/sampling.h"

MTP_KERNELS(SamplingKernels, sampling)

namespace mtp::cpu {
namespace {

// One row of probabilities, divided by its sum where it is read; a row without any is all 0.
struct Distribution {
  const char* row = nullptr;
  int type = 0;
  int64_t vocab = 0;
  double total = 0.0;

  void read(int64_t start, int64_t count, double divisor, double* out) const {
    sampling().probabilities[type](row + start * element_size(type), count, divisor, out);
  }

  double probability(int64_t token) const {
    double value = 0.0;
    if (in_range(token, vocab) && total > 0.0) {
      read(token, 1, total, &value);
    }
    return value;
  }
};

// Calls body(chunk, start, count) for the chunks of a row, on torch's threads unless this is one of them.
template <class Body>
void for_chunks(int64_t vocab, const Body& body) {
  torch::stable::parallel_for(0, (vocab + kDrawChunk - 1) / kDrawChunk, 8, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      body(chunk, chunk * kDrawChunk, std::min(kDrawChunk, vocab - chunk * kDrawChunk));
    }
  });
}

Distribution distribution(const char* row, int type, int64_t vocab) {
  Distribution made{row, type, vocab, 0.0};
  std::vector<double> sums(static_cast<size_t>((vocab + kDrawChunk - 1) / kDrawChunk));
  for_chunks(vocab, [&](int64_t chunk, int64_t start, int64_t count) {
    double values[kDrawChunk];
    made.read(start, count, 1.0, values);
    sums[chunk] = sampling().sum(values, count);
  });
  for (const double sum : sums) {
    made.total += sum;
  }
  return made;
}

// What the last token is drawn from: p, less q or less the tokens that were tried.
struct Weights {
  Distribution p;
  std::optional<Distribution> q;
  std::vector<int64_t> removed;

  void read(int64_t start, int64_t count, double* out) const {
    if (!(p.total > 0.0)) {
      std::fill_n(out, count, 0.0);
      return;
    }
    p.read(start, count, p.total, out);
    if (q && q->total > 0.0) {
      double values[kDrawChunk];
      q->read(start, count, q->total, values);
      for (int64_t i = 0; i < count; ++i) {
        out[i] = std::max(out[i] - values[i], 0.0);
      }
    }
    for (const int64_t token : removed) {
      if (in_range(token - start, count)) {
        out[token - start] = 0.0;
      }
    }
  }
};

// The first token with a weight whose cumulative weight exceeds u times the total, the last one where rounding or a
// u outside [0, 1) leaves none; -1 where there is no weight.
int64_t draw(const Weights& weights, int64_t vocab, double u) {
  const int64_t chunks = (vocab + kDrawChunk - 1) / kDrawChunk;
  std::vector<double> sums(static_cast<size_t>(chunks));
  for_chunks(vocab, [&](int64_t chunk, int64_t start, int64_t count) {
    double values[kDrawChunk];
    weights.read(start, count, values);
    sums[chunk] = sampling().sum(values, count);
  });
  double total = 0.0;
  int64_t last_chunk = -1;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    total += sums[chunk];
    last_chunk = sums[chunk] > 0.0 ? chunk : last_chunk;
  }
  const double threshold = u * total;
  double before = 0.0;
  int64_t last = -1;
  for (int64_t chunk = 0; chunk <= last_chunk; before += sums[chunk++]) {
    if (!(before + sums[chunk] > threshold) && chunk != last_chunk) {
      continue;
    }
    double values[kDrawChunk];
    const int64_t start = chunk * kDrawChunk;
    const int64_t count = std::min(kDrawChunk, vocab - start);
    weights.read(start, count, values);
    double cumulative = before;
    for (int64_t i = 0; i < count; ++i) {
      cumulative += values[i];
      if (values[i] > 0.0) {
        last = start + i;
        if (cumulative > threshold) {
          return last;
        }
      }
    }
  }
  return last;
}

struct Walk {
  const VerifySampleParams& p;
  int64_t b;

  bool has_row(int64_t node) const { return in_range(p.retrieve_index(b, node), p.num_rows); }

  Distribution target(int64_t node) const {
    const int64_t row = p.retrieve_index(b, node);
    const int64_t offset = row / p.target_columns * p.target_stride[0] + row % p.target_columns * p.target_stride[1];
    return distribution(p.target_probs + offset * element_size(p.type), p.type, p.vocab);
  }

  Distribution draft(int64_t node) const {
    const int64_t offset = b * p.draft_stride[0] + node * p.draft_stride[1];
    return distribution(p.draft_probs + offset * element_size(p.type), p.type, p.vocab);
  }

  // A link outside 1..num_nodes - 1 is none: node 0 is the root, nobody's child.
  bool is_child(int64_t node) const { return in_range(node - 1, p.num_nodes - 1); }

  // The first child of `node` that is accepted, or -1, with what is left of weights.p in weights.
  int64_t try_in_turn(int64_t node, Weights& weights) const {
    double remaining = weights.p.total > 0.0 ? 1.0 : 0.0;
    int64_t child = p.retrieve_next_token(b, node);
    // num_nodes links are followed at the most, so a ring of them ends.
    for (int64_t tried = 0; tried < p.num_nodes && is_child(child); ++tried) {
      if (has_row(child)) {
        const int64_t token = p.draft_ids(b, child);
        const bool again = std::find(weights.removed.begin(), weights.removed.end(), token) != weights.removed.end();
        const double mass = again ? 0.0 : weights.p.probability(token);
        if (mass > 0.0 && p.uniform(b, child) * std::max(remaining, 0.0) < mass) {
          return child;
        }
        remaining -= mass;
        if (!again) {
          weights.removed.push_back(token);
        }
      }
      child = p.retrieve_next_sibling(b, child);
    }
    return -1;
  }

  int64_t try_sampled(int64_t node, Weights& weights) const {
    const int64_t child = p.retrieve_next_token(b, node);
    if (!is_child(child) || !has_row(child)) {
      return -1;
    }
    weights.q = draft(node);
    const int64_t token = p.draft_ids(b, child);
    const double mass = weights.p.probability(token);
    const bool accept = mass > 0.0 && p.uniform(b, child) * weights.q->probability(token) < mass;
    return accept ? child : -1;
  }

  void run() const {
    const int64_t width = p.max_depth + 1;
    int64_t* accept_index = p.accept_index + b * width;
    int64_t* accept_ids = p.accept_ids + b * width;
    std::fill_n(accept_index, width, int64_t{-1});
    std::fill_n(accept_ids, width, int64_t{-1});
    p.num_accepted[b] = 0;
    accept_index[0] = p.retrieve_index(b, 0);
    if (!has_row(0)) {
      return;
    }
    const int64_t most = std::min(p.max_depth, p.num_nodes - 1);
    Weights weights{target(0), {}, {}};
    for (int64_t node = 0, accepted = 0; accepted < most;) {
      node = p.draft_probs ? try_sampled(node, weights) : try_in_turn(node, weights);
      if (node < 0) {
        break;
      }
      accept_ids[accepted] = p.draft_ids(b, node);
      accept_index[++accepted] = p.retrieve_index(b, node);
      p.num_accepted[b] = accepted;
      weights = {target(node), {}, {}};
    }
    const double u = p.uniform_final(b);
    int64_t token = draw(weights, p.vocab, u);
    if (token < 0) {
      token = draw({weights.p, {}, {}}, p.vocab, u);
    }
    accept_ids[p.num_accepted[b]] = std::max<int64_t>(token, 0);
  }
};

std::tuple<Tensor, Tensor, Tensor> verify_sample(Tensor draft_ids, Tensor retrieve_index, Tensor retrieve_next_token,
                                                 Tensor retrieve_next_sibling, Tensor target_probs, Tensor uniform,
                                                 Tensor uniform_final, int64_t max_depth,
                                                 std::optional<Tensor> draft_probs) {
  VerifySampleParams p{};
  p.batch = draft_ids.size(0);
  p.num_nodes = draft_ids.size(1);
  p.vocab = target_probs.size(target_probs.dim() - 1);
  p.max_depth = max_depth;
  STD_TORCH_CHECK(p.num_nodes >= 1 && max_depth >= 0 && p.vocab >= 1, "verify_sample: nothing to choose from");
  p.num_rows = target_probs.numel() / p.vocab;
  p.draft_ids = index_view<2>(draft_ids);
  p.retrieve_index = index_view<2>(retrieve_index);
  p.retrieve_next_token = index_view<2>(retrieve_next_token);
  p.retrieve_next_sibling = index_view<2>(retrieve_next_sibling);
  p.type = float_type(target_probs);
  p.target_probs = static_cast<const char*>(target_probs.const_data_ptr());
  const bool by_node = target_probs.dim() == 3;
  p.target_columns = by_node ? std::max<int64_t>(1, target_probs.size(1)) : 1;
  p.target_stride[0] = target_probs.stride(0);
  p.target_stride[1] = by_node ? target_probs.stride(1) : 0;
  if (draft_probs) {
    p.draft_probs = static_cast<const char*>(draft_probs->const_data_ptr());
    p.draft_stride[0] = draft_probs->stride(0);
    p.draft_stride[1] = draft_probs->stride(1);
  }
  p.uniform = view<float, 2>(uniform);
  p.uniform_final = view<float, 1>(uniform_final);
  Tensor accept_index = empty_int64({p.batch, max_depth + 1});
  Tensor num_accepted = empty_int64({p.batch});
  Tensor accept_ids = empty_int64({p.batch, max_depth + 1});
  p.accept_index = data<int64_t>(accept_index);
  p.num_accepted = data<int64_t>(num_accepted);
  p.accept_ids = data<int64_t>(accept_ids);
  for_requests(p.batch, p.vocab, [&p](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      Walk{p, b}.run();
    }
  });
  return {accept_index, num_accepted, accept_ids};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "verify_sample(Tensor draft_ids, Tensor retrieve_index, Tensor retrieve_next_token, Tensor"
      " retrieve_next_sibling, Tensor target_probs, Tensor uniform, Tensor uniform_final, SymInt max_depth, *,"
      " Tensor? draft_probs=None) -> (Tensor accept_index, Tensor num_accepted, Tensor accept_ids)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("verify_sample", TORCH_BOX(&mtp::cpu::verify_sample)); }
