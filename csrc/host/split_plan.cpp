#include "mtp/split_plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <tuple>

namespace mtp {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

auto fields(const SplitProblem& p) {
  return std::tie(p.visible_len, p.first_key, p.page_size, p.rows, p.num_qo_heads, p.num_kv_heads, p.head_dim,
                  p.element_size, p.num_sms);
}

auto fields(const SplitPlan& p) { return std::tie(p.start, p.tile_keys, p.keys_per_split, p.num_splits); }

void require(bool ok, const char* name, const char* expected, int64_t got) {
  if (!ok) {
    std::ostringstream message;
    message << "split_plan: " << name << ": expected " << expected << ", got " << got;
    throw std::invalid_argument(message.str());
  }
}

void check(const SplitProblem& p) {
  const char* length = "0 to 2^40";
  require(p.visible_len >= 0 && p.visible_len <= kMaxLength, "visible_len", length, p.visible_len);
  require(p.first_key >= 0 && p.first_key <= kMaxLength, "first_key", length, p.first_key);
  const char* size = "1 to 2^20";
  const auto positive = [&](const char* name, int64_t value) {
    require(value >= 1 && value <= (int64_t{1} << 20), name, size, value);
  };
  positive("page_size", p.page_size);
  positive("rows", p.rows);
  positive("num_qo_heads", p.num_qo_heads);
  positive("num_kv_heads", p.num_kv_heads);
  positive("head_dim", p.head_dim);
  positive("element_size", p.element_size);
  positive("num_sms", p.num_sms);
  require(p.num_qo_heads % p.num_kv_heads == 0, "num_qo_heads", "a multiple of num_kv_heads", p.num_qo_heads);
}

// The largest power of two of keys whose K fits kTileBytes.
int64_t tile_keys(const SplitProblem& p) {
  int64_t keys = kMinTileKeys;
  while (keys < kMaxTileKeys && 2 * keys * p.head_dim * p.element_size <= kTileBytes) {
    keys *= 2;
  }
  return keys;
}

// Splits begin on a page and hold whole tiles: whole pages, at least a tile's worth.
int64_t granule(const SplitProblem& p) { return round_up(tile_keys(p), p.page_size); }

// One block a (KV head, split): as many splits as give every multiprocessor a block when a request is alone.
int64_t wanted_splits(const SplitProblem& p) { return std::clamp<int64_t>(p.num_sms / p.num_kv_heads, 1, kMaxSplits); }

int64_t smallest_split(const SplitProblem& p) { return round_up(kMinKeysPerSplit, granule(p)); }

}  // namespace

bool SplitProblem::operator==(const SplitProblem& other) const { return fields(*this) == fields(other); }

bool SplitPlan::operator==(const SplitPlan& other) const { return fields(*this) == fields(other); }

SplitPlan split_plan(const SplitProblem& p) {
  check(p);
  const int64_t start = p.first_key / p.page_size * p.page_size;
  const int64_t length = p.first_key - start + p.visible_len;  // from the page's start, so that splits are whole pages
  const int64_t keys = std::max(smallest_split(p), round_up(ceil_div(length, wanted_splits(p)), granule(p)));
  return {start, tile_keys(p), keys, p.visible_len == 0 ? 0 : ceil_div(length, keys)};
}

int64_t max_splits(const SplitProblem& p) {
  check(p);
  if (p.visible_len == 0) {
    return 0;
  }
  return std::min(wanted_splits(p), ceil_div(p.visible_len + p.page_size - 1, smallest_split(p)));
}

int64_t workspace_bytes(const SplitProblem& p, int64_t batch) {
  require(batch >= 0 && batch <= (int64_t{1} << 20), "batch", "0 to 2^20", batch);
  const int64_t splits = max_splits(p);
  if (splits <= 1) {
    return 0;
  }
  constexpr int64_t kFloat = 4;
  // Saturates instead of wrapping: no allocator has that much, and it says so.
  const __int128 bytes = static_cast<__int128>(batch) * p.rows * p.num_qo_heads * splits * (p.head_dim + 1) * kFloat;
  return bytes > INT64_MAX ? INT64_MAX : static_cast<int64_t>(bytes);
}

std::string to_string(const SplitProblem& p) {
  std::ostringstream out;
  out << "SplitProblem(visible_len=" << p.visible_len << ", first_key=" << p.first_key << ", page_size=" << p.page_size
      << ", rows=" << p.rows << ", num_qo_heads=" << p.num_qo_heads << ", num_kv_heads=" << p.num_kv_heads
      << ", head_dim=" << p.head_dim << ", element_size=" << p.element_size << ", num_sms=" << p.num_sms << ")";
  return out.str();
}

std::string to_string(const SplitPlan& p) {
  std::ostringstream out;
  out << "SplitPlan(start=" << p.start << ", tile_keys=" << p.tile_keys << ", keys_per_split=" << p.keys_per_split
      << ", num_splits=" << p.num_splits << ")";
  return out.str();
}

}  // namespace mtp
