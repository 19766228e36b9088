// draft_attention as a program of a team.
#pragma once

#include "isa.h"
#include "mtp/attention.h"
#include "rows.h"
#include "team.h"

MTP_KERNELS(AttentionEnds, attention_ends)
MTP_KERNELS(AttentionKernels, attention_kernels)

namespace mtp::cpu {

// A paged cache with all that is said about it. The tensors are the caller's, and outlive this.
struct Cache {
  const Tensor& k;
  const Tensor& v;
  const Tensor& block_table;
  const Tensor& seq_lens;
  const Tensor* kv_indptr;
  int64_t max_seq_len;
  int64_t window_left;
  const Tensor* k_scale;
  const Tensor* v_scale;
};

// What happens to the queries first.
struct Turn {
  const Tensor* norm_weight;
  double norm_eps;
  const Tensor* inv_freq;
  const Tensor* positions;
};

class DraftAttention {
 public:
  // q [batch, rows, num_qo_heads, head_dim]; output the same, contiguous.
  DraftAttention(const Tensor& q, const Cache& cache, double sm_scale, double logits_soft_cap, const Turn& turn,
                 void* output);

  void place(Carver& carver);
  int64_t products() const;
  void run(Member& member) const;

 private:
  AttentionParams p_{};
  int q_type_, kv_type_;
  int64_t members_, parts_, keys_ = 0;
  int64_t together_;  // KV heads that one task takes
  std::vector<AttentionRequest> requests_;
  float* scratch_ = nullptr;  // [members, scratch_size_]
  int64_t scratch_size_;
};

}  // namespace mtp::cpu
