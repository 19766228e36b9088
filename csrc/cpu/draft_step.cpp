// Whole draft steps in one parallel region: the programs of the public ops one after the other, with the same bits.
#include <deque>
#include <functional>
#include <memory>

#include "centroids.h"
#include "draft_attention.h"
#include "linear.h"
#include "lm_head.h"

namespace mtp::cpu {
namespace {

using Tensors = std::vector<Tensor>;

// What a layer has, in the order in which mtp_kernels/_cpu_step.py lists it.
enum LayerTensor {
  kInputNorm,
  kQueryWeight,
  kQueryNorm,
  kInvFreq,
  kOutputWeight,
  kPostAttentionNorm,
  kPreFeedforwardNorm,
  kGateUpWeight,
  kDownWeight,
  kPostFeedforwardNorm,
  kLayerScalar,
  kLayerTensors,
};

// What the view of a layer's cache has: tensors, and numbers. A tensor that it lacks stands as an empty one.
enum ViewTensor { kKeys, kValues, kBlockTable, kSeqLens, kKvIndptr, kKScale, kVScale, kViewTensors };
enum ViewNumber { kMaxSeqLen, kWindowLeft, kViewNumbers };

Cache cache_of(const Tensor* t, const int64_t* n) {
  const auto given = [](const Tensor& tensor) { return tensor.numel() > 0 ? &tensor : nullptr; };
  return {t[kKeys],      t[kValues],     t[kBlockTable],    t[kSeqLens],      given(t[kKvIndptr]),
          n[kMaxSeqLen], n[kWindowLeft], given(t[kKScale]), given(t[kVScale])};
}

// All programs of some steps, and the buffers between them.
class Steps {
 public:
  Steps(const Tensor& like, int64_t batch, int64_t rows, double eps)
      : like_(like), batch_(batch), rows_(rows), eps_(eps), type_(float_type(like)) {}

  Tensor buffer(int64_t columns) {
    buffers_.push_back(empty_of_dtype({batch_, rows_, columns}, like_));
    return buffers_.back();
  }

  Rows flat(const Tensor& x, int64_t columns) const { return Rows(x.const_data_ptr(), type_, batch_ * rows_, columns); }

  // Programs run in the order in which they are added.
  template <class Program>
  void add(Program program) {
    auto kept = std::make_shared<Program>(std::move(program));
    products_ += kept->products();
    parts_.push_back({[kept](Carver& carver) { kept->place(carver); }, [kept](Member& member) { kept->run(member); }});
  }

  int64_t size() const { return static_cast<int64_t>(parts_.size()); }

  // Programs [begin, end) once more.
  void repeat(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      parts_.push_back(Part(parts_[i]));
    }
  }

  // The layer's result lies in x again.
  void add_layer(const Tensor* t, const Cache& cache, double sm_scale, const Tensor& positions, const Tensor& x) {
    const int64_t hidden = x.size(2);
    const int64_t head_dim = cache.k.size(3);
    const int64_t heads = t[kQueryWeight].size(0) / head_dim;
    const int64_t inner_size = t[kGateUpWeight].size(0) / 2;
    const Tensor middle = buffer(hidden);
    const Tensor inner = buffer(inner_size);
    const Tensor attended = buffer(heads * head_dim);
    buffers_.push_back(empty_of_dtype({batch_, rows_, heads, head_dim}, like_));
    const Tensor q = buffers_.back();
    add(NormProject(flat(x, hidden), &t[kInputNorm], eps_, nullptr, t[kQueryWeight], heads * head_dim,
                    q.mutable_data_ptr()));
    add(DraftAttention(q, cache, sm_scale, 0.0, {&t[kQueryNorm], eps_, &t[kInvFreq], &positions},
                       attended.mutable_data_ptr()));
    add(LinearNormAdd(flat(attended, heads * head_dim), &t[kOutputWeight], t[kPostAttentionNorm], eps_, flat(x, hidden),
                      nullptr, middle.mutable_data_ptr()));
    add(NormGeglu(flat(middle, hidden), t[kPreFeedforwardNorm], eps_, t[kGateUpWeight], inner.mutable_data_ptr()));
    add(LinearNormAdd(flat(inner, inner_size), &t[kDownWeight], t[kPostFeedforwardNorm], eps_, flat(middle, hidden),
                      &t[kLayerScalar], x.mutable_data_ptr()));
  }

  // The programs' workspaces share one place: only one of them runs at a time.
  void run() {
    int64_t bytes = 1;
    for (const Part& part : parts_) {
      Carver count(nullptr);
      part.place(count);
      bytes = std::max(bytes, count.bytes());
    }
    const Tensor workspace = empty({bytes}, aoti_torch_dtype_uint8());
    for (const Part& part : parts_) {
      Carver carver(data<char>(workspace));
      part.place(carver);
    }
    run_team(threads_for(products_), [&](Member& member) {
      for (const Part& part : parts_) {
        part.run(member);
      }
    });
  }

 private:
  struct Part {
    std::function<void(Carver&)> place;
    std::function<void(Member&)> run;
  };

  const Tensor& like_;
  int64_t batch_, rows_;
  double eps_;
  int type_;
  int64_t products_ = 0;
  std::deque<Tensor> buffers_;
  std::vector<Part> parts_;
};

// The next step of a chain grows from what a step leaves: ids [batch, rows, 1] and states [batch, rows, backbone].
Origin chained(const int64_t* ids, const void* states, int64_t batch, int64_t rows, int64_t backbone) {
  return {{ids, {rows, 1}, true}, batch, rows, states, {rows * backbone, backbone}, rows, std::nullopt};
}

std::tuple<Tensor, Tensor, Tensor> draft_step(Tensor token_ids, Tensor state, Tensor positions,
                                              std::optional<Tensor> row_index, Tensor embed_weight, double embed_scale,
                                              Tensor pre_projection, Tensor post_projection, Tensor norm, double eps,
                                              Tensor lm_head, std::optional<Tensor> centroids,
                                              std::optional<Tensor> token_ordering, int64_t num_active,
                                              bool centroid_ordered, Tensors layers, std::vector<double> sm_scales,
                                              std::vector<int64_t> views_of_layers, Tensors views,
                                              std::vector<int64_t> view_numbers, int64_t k, int64_t num_steps) {
  const int64_t batch = token_ids.size(0);
  const int64_t rows = token_ids.size(1);
  const int64_t hidden = pre_projection.size(0);
  const int64_t backbone = post_projection.size(0);
  const size_t num_layers = sm_scales.size();
  STD_TORCH_CHECK(layers.size() == num_layers * kLayerTensors && views_of_layers.size() == num_layers,
                  "draft_step: the lists of the layers have different lengths");
  STD_TORCH_CHECK(num_steps == 1 || (num_steps > 1 && k == 1),
                  "draft_step: only a chain has several steps, and at least one");
  Tensor logprobs = empty_float({num_steps, batch, rows, k});
  Tensor ids = empty_int64({num_steps, batch, rows, k});
  Tensor states = empty_of_dtype({num_steps, batch, rows, backbone}, state);
  if (batch * rows == 0) {
    return {logprobs, ids, states};
  }
  const Tensor logsumexp = empty_float({batch, rows});
  Steps steps(embed_weight, batch, rows, eps);
  const Tensor x = steps.buffer(hidden);
  const Tensor normed = steps.buffer(hidden);
  Origin origin = Origin::of(token_ids, state, row_index);
  int64_t layers_end = 0;
  for (int64_t step = 0; step < num_steps; ++step) {
    float* step_logprobs = data<float>(logprobs) + step * batch * rows * k;
    int64_t* step_ids = data<int64_t>(ids) + step * batch * rows * k;
    char* next_state = data<char>(states) + step * batch * rows * backbone * element_size(float_type(state));
    steps.add(PreProject(origin, embed_weight, embed_scale, pre_projection, 0, x.mutable_data_ptr()));
    if (step == 0) {
      for (size_t i = 0; i < num_layers; ++i) {
        const size_t view = static_cast<size_t>(views_of_layers[i]);
        STD_TORCH_CHECK((view + 1) * kViewTensors <= views.size() && (view + 1) * kViewNumbers <= view_numbers.size(),
                        "draft_step: layer ", i, " has no view");
        const Cache cache = cache_of(views.data() + view * kViewTensors, view_numbers.data() + view * kViewNumbers);
        steps.add_layer(layers.data() + i * kLayerTensors, cache, sm_scales[i], positions, x);
      }
      layers_end = steps.size();
    } else {
      steps.repeat(1, layers_end);
    }
    steps.add(NormProject(steps.flat(x, hidden), &norm, eps, normed.mutable_data_ptr(), post_projection, backbone,
                          next_state));
    const TopK top{k, step_logprobs, step_ids, data<float>(logsumexp)};
    if (centroids) {
      CentroidHead head(steps.flat(normed, hidden), *centroids, *token_ordering, lm_head, num_active, centroid_ordered);
      STD_TORCH_CHECK(k >= 1 && k <= head.candidates(), "draft_step: k is out of range");
      steps.add(CentroidTopK(std::move(head), top));
    } else {
      steps.add(LmHeadTopK(steps.flat(normed, hidden), lm_head, nullptr, nullptr, 0, 0.0, {}, top));
    }
    origin = chained(step_ids, next_state, batch, rows, backbone);
  }
  steps.run();
  return {logprobs, ids, states};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "draft_step(Tensor token_ids, Tensor state, Tensor positions, Tensor? row_index, Tensor embed_weight,"
      " float embed_scale, Tensor pre_projection, Tensor post_projection, Tensor norm, float eps, Tensor lm_head,"
      " Tensor? centroids, Tensor? token_ordering, int num_active, bool centroid_ordered, Tensor[] layers,"
      " float[] sm_scales, int[] views_of_layers, Tensor[] views, int[] view_numbers, int k,"
      " int num_steps) -> (Tensor logprobs, Tensor token_ids, Tensor states)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("draft_step", TORCH_BOX(&mtp::cpu::draft_step)); }
