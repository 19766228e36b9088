// mtp_cuda::segment: what lies between two attentions of a draft step (segment.cu), as a private op on the stable ABI.
#include "segment.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "op.h"

namespace mtp::cuda {
namespace {

constexpr char kOp[] = "segment";
constexpr int64_t kMostChunks = 1 << 16;  // and keys that a chunk is a multiple of
constexpr int64_t kHeader = 16;           // words of the workspace before the mail: epochs, in a line of their own

void set_columns(Product& p, int64_t columns, int blocks) {
  p.columns = static_cast<int>(columns);
  p.units_each = p.columns / kUnitColumns / blocks;
  p.units_more = p.columns / kUnitColumns % blocks;
}

// `log2_shares`: of the depth, each of which is a warp's.
Product product(const Tensor& weight, const char* name, int64_t rows, int64_t depth, int log2_shares, int blocks) {
  STD_TORCH_CHECK(rows % kUnitColumns == 0 && depth % (kShareDepth << log2_shares) == 0, "segment: ", name,
                  " has a size that is not served");
  Product p;
  p.weight = matrix(weight, kOp, name, rows, depth);
  p.stride = weight.stride(0);
  p.pieces = static_cast<int>(depth / kPieceDepth >> log2_shares);
  p.log2_warps = log2_shares;
  set_columns(p, rows, blocks);
  return p;
}

// Of a group.
int count_blocks(int device, int groups, int64_t inner) {
  int sms = 0;
  STD_TORCH_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) == cudaSuccess && sms > 0,
                  "segment: the number of SMs of device ", device, " is not known");
  const int64_t units = inner / kUnitColumns, most = std::max(1, sms / groups);
  const int64_t each = (units + most - 1) / most;
  return static_cast<int>((units + each - 1) / each);  // every block has a unit of gate_up, so reads the epoch in time
}

struct Chunks {
  int64_t max_chunks, chunk_multiple, fold, chunks_a_part, num_kv_heads;
};

// Of an attention [rows, heads] that has left chunks, or folds of them.
void set_chunks(Attention& a, const Chunks& c, const Tensor& partial, const Tensor& stats, const Tensor& seq_lens,
                const Tensor* v_scale, int64_t heads) {
  constexpr auto kFloat = ScalarType::Float;
  STD_TORCH_CHECK(c.fold >= 1 && c.fold <= 8 && (c.chunks_a_part == 1 || c.chunks_a_part == c.fold) &&
                      c.max_chunks >= 1 && c.max_chunks <= kMostChunks && c.chunk_multiple >= 1 &&
                      c.chunk_multiple <= kMostChunks && c.num_kv_heads >= 1 && heads % c.num_kv_heads == 0,
                  "segment: the chunks of the attention are not what they must be");
  log2_of(c.chunk_multiple, kOp, "chunk_multiple");
  const int64_t batch = seq_lens.size(0);
  a.parts = static_cast<int>(partial.size(1));
  check(partial, kOp, "partial", kFloat, {batch * a.rows_each * heads, a.parts, a.head_dim});
  check(stats, kOp, "stats", kFloat, {batch * a.rows_each * heads, a.parts, 2});
  a.partial = partial.const_data_ptr<float>();
  a.stats = stats.const_data_ptr<float>();
  a.lengths_are_int64 = is_int64(seq_lens, kOp, "seq_lens");
  check(seq_lens, kOp, "seq_lens", seq_lens.scalar_type(), {batch});
  a.seq_lens = seq_lens.const_data_ptr();
  if (v_scale != nullptr) {
    a.v_scale_stride = scale_stride(*v_scale, kOp, "v_scale", c.num_kv_heads);
    a.v_scale = v_scale->const_data_ptr<float>();
  }
  const int64_t folds = c.chunks_a_part == c.fold ? a.parts : (a.parts + c.fold - 1) / c.fold;
  while (a.log2_lanes < 4 && (int64_t{1} << a.log2_lanes) < folds) {
    ++a.log2_lanes;
  }
  a.log2_units = log2_of(a.head_dim, kOp, "head_dim") - (7 - a.log2_lanes);
  STD_TORCH_CHECK(a.log2_units >= 0, "segment: a head_dim of ", a.head_dim);
  a.log2_max_chunks = log2_of(c.max_chunks, kOp, "max_chunks");
  a.chunk_multiple = static_cast<int>(c.chunk_multiple);
  a.fold = static_cast<int>(c.fold);
  a.log2_fold = log2_of(c.fold, kOp, "fold");
  a.chunks_a_part = static_cast<int>(c.chunks_a_part);
  a.log2_group = log2_of(heads / c.num_kv_heads, kOp, "the query heads of a KV head");
}

// At most: lanes keep one each.
int runs_of_a_warp(const Segment& s) {
  int runs = 0;
  for (int i = 0; i < s.num_products; ++i) {
    const Product& p = s.products[i];
    const int units = p.units_each + (p.units_more > 0 ? 1 : 0);
    runs += ((units << p.log2_warps) + (1 << kLog2Warps) - 1) >> kLog2Warps;
  }
  return runs;
}

void segment(Tensor attended, std::optional<Tensor> partial, std::optional<Tensor> stats, Tensor seq_lens,
             std::optional<Tensor> v_scale, int64_t capacity, int64_t bound, double chunk_weight, int64_t max_chunks,
             int64_t chunk_multiple, int64_t fold, int64_t chunks_a_part, int64_t num_kv_heads, Tensor residual,
             Tensor o_proj, Tensor post_attention_norm, double eps, Tensor pre_feedforward_norm, Tensor gate_up,
             Tensor down, Tensor post_feedforward_norm, std::optional<Tensor> layer_scalar, Tensor next_norm,
             Tensor next_weight, Tensor output, std::optional<Tensor> x_out, std::optional<Tensor> normed,
             std::optional<Tensor> centroids, std::optional<Tensor> scores, std::optional<Tensor> group_max,
             Tensor workspace, bool early) {
  constexpr auto kHalf = ScalarType::BFloat16;
  constexpr auto kFloat = ScalarType::Float;
  STD_TORCH_CHECK(attended.dim() == 4, "segment: attended is not [batch, rows, heads, head_dim]");
  const int64_t rows = attended.size(0) * attended.size(1);
  const int64_t heads = attended.size(2);
  const int64_t head_dim = attended.size(3);
  const int64_t columns = heads * head_dim;
  const int64_t hidden = o_proj.size(0);
  const int64_t inner = down.size(1);
  STD_TORCH_CHECK(rows >= 1 && rows <= kMostRows, "segment: ", rows, " rows");
  STD_TORCH_CHECK(hidden == kHidden, "segment: a hidden size of ", hidden);
  check(attended, kOp, "attended", kHalf, {attended.size(0), attended.size(1), heads, head_dim});
  check(residual, kOp, "residual", kHalf, {rows, hidden});
  check(post_attention_norm, kOp, "post_attention_norm", kHalf, {hidden});
  check(pre_feedforward_norm, kOp, "pre_feedforward_norm", kHalf, {hidden});
  check(post_feedforward_norm, kOp, "post_feedforward_norm", kHalf, {hidden});
  check(next_norm, kOp, "next_norm", kHalf, {hidden});
  STD_TORCH_CHECK(seq_lens.dim() == 1 && seq_lens.size(0) == attended.size(0), "segment: seq_lens is not [batch]");
  check(output, kOp, "output", kHalf, {rows, next_weight.size(0)});

  Segment s;
  Attention& a = s.attention;
  a.attended = attended.const_data_ptr();
  a.log2_heads = log2_of(heads, kOp, "the number of heads");
  a.head_dim = static_cast<int>(head_dim);
  a.rows_each = static_cast<int>(attended.size(1));
  if (partial) {
    STD_TORCH_CHECK(stats, "segment: partial without stats");
    const Chunks chunks{max_chunks, chunk_multiple, fold, chunks_a_part, num_kv_heads};
    set_chunks(a, chunks, *partial, *stats, seq_lens, v_scale ? &*v_scale : nullptr, heads);
    a.capacity = capacity;
    a.bound = bound;
    a.chunk_weight = static_cast<float>(chunk_weight);
  }

  const int device = attended.get_device_index();
  const int each = rows_of_group(static_cast<int>(rows)), groups = count_groups(static_cast<int>(rows));
  const int blocks = count_blocks(device, groups, inner);
  STD_TORCH_CHECK(each <= blocks, "segment: ", rows, " rows, and only ", groups * blocks, " blocks");
  s.products[kOutput] = product(o_proj, "o_proj", hidden, columns, kLog2Warps, blocks);
  const int log2_gated = log2_gated_warps(static_cast<int>(rows));  // half of them have gate
  s.products[kGateUp] = product(gate_up, "gate_up", 2 * inner, hidden, log2_gated - 1, blocks);
  s.products[kGateUp].second = inner * gate_up.stride(0);
  s.products[kGateUp].log2_warps = log2_gated;
  set_columns(s.products[kGateUp], inner, blocks);
  s.products[kDown] = product(down, "down", hidden, inner, kLog2Warps, blocks);
  s.products[kDown].first_block = static_cast<int>(hidden / kUnitColumns % blocks);  // behind those of o_proj
  s.products[kNext] = product(next_weight, "next_weight", next_weight.size(0), hidden, 0, blocks);
  s.products[kNext].first_warp = 2;
  s.num_products = 4;
  if (centroids) {
    STD_TORCH_CHECK(scores && group_max, "segment: centroids without scores");
    const int64_t count = centroids->size(0);
    s.products[kScores] = product(*centroids, "centroids", count, hidden, 0, blocks);
    s.products[kScores].first_warp = 5;
    check(*scores, kOp, "scores", kFloat, {rows, count});
    check(*group_max, kOp, "group_max", kFloat, {rows, count / kUnitColumns});
    s.scores = static_cast<float*>(scores->mutable_data_ptr());
    s.group_max = static_cast<float*>(group_max->mutable_data_ptr());
    s.num_products = 5;
  }
  STD_TORCH_CHECK(runs_of_a_warp(s) < kMostRuns, "segment: too few SMs for weights of this size");
  s.residual = residual.const_data_ptr();
  s.post_attention_norm = post_attention_norm.const_data_ptr();
  s.pre_feedforward_norm = pre_feedforward_norm.const_data_ptr();
  s.post_feedforward_norm = post_feedforward_norm.const_data_ptr();
  s.next_norm = next_norm.const_data_ptr();
  if (layer_scalar) {
    check(*layer_scalar, kOp, "layer_scalar", kHalf, {1});
    s.layer_scalar = layer_scalar->const_data_ptr();
  }
  s.eps = static_cast<float>(eps);
  s.rows = static_cast<int>(rows);
  s.group_rows = each;
  s.group_blocks = blocks;
  s.attended_columns = static_cast<int>(columns);
  s.inner_columns = static_cast<int>(inner);
  s.output = output.mutable_data_ptr();
  if (x_out) {
    check(*x_out, kOp, "x_out", kHalf, {rows, hidden});
    s.x_out = x_out->mutable_data_ptr();
  }
  if (normed) {
    check(*normed, kOp, "normed", kHalf, {rows, hidden});
    s.normed = normed->mutable_data_ptr();
  }
  const int64_t words = kHeader + rows * (columns / 2 + inner / 2 + 3 * hidden);
  STD_TORCH_CHECK(
      workspace.scalar_type() == ScalarType::Long && workspace.is_contiguous() && workspace.numel() >= words,
      "segment: workspace is not ", words, " words of int64");
  auto* mail = static_cast<uint64_t*>(workspace.mutable_data_ptr());
  s.epochs = mail;
  s.mail_attended = mail + kHeader;
  s.mail_o = s.mail_attended + rows * columns / 2;
  s.mail_inner = s.mail_o + rows * hidden;
  s.mail_down = s.mail_inner + rows * inner / 2;
  s.mail_normed = s.mail_down + rows * hidden;

  const torch::stable::accelerator::DeviceGuard guard(device);
  const int error = launch_segment(s, early, current_stream(device));
  STD_TORCH_CHECK(error == 0, "segment: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

int64_t bytes_of_rows(int64_t rows) { return segment_bytes(static_cast<int>(rows)); }

}  // namespace
}  // namespace mtp::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cuda, m) {
  m.def("segment_bytes(int rows) -> int");
  m.def(
      "segment(Tensor attended, Tensor? partial, Tensor? stats, Tensor seq_lens, Tensor? v_scale, int capacity, int "
      "bound, float chunk_weight, int max_chunks, int chunk_multiple, int fold, int chunks_a_part, int num_kv_heads, "
      "Tensor residual, Tensor o_proj, Tensor post_attention_norm, float eps, Tensor pre_feedforward_norm, Tensor "
      "gate_up, Tensor down, Tensor post_feedforward_norm, Tensor? layer_scalar, Tensor next_norm, Tensor next_weight, "
      "Tensor(a!) output, Tensor(b!)? x_out, Tensor(c!)? normed, Tensor? centroids, Tensor(d!)? scores, Tensor(e!)? "
      "group_max, Tensor(f!) workspace, bool early) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cuda, CompositeExplicitAutograd, m) {
  m.impl("segment_bytes", TORCH_BOX(&mtp::cuda::bytes_of_rows));
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cuda, CUDA, m) { m.impl("segment", TORCH_BOX(&mtp::cuda::segment)); }
