// A layer on a CPU: selection, sorting, activation and combination in one pass each, in fp32, rounded once, around
// products of torch. Of torch's headers it needs those of its C interface alone, and is built in seconds.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

// A loop with a call in it is no loop of vectors.
#if defined(__GNUC__)
#define INLINED inline __attribute__((always_inline))
#else
#define INLINED inline
#endif

namespace {

// Elements that two threads share: waking one costs as much as computing some tens of thousands.
constexpr int64_t SHARED = 1 << 16;
constexpr int64_t COLUMNS = 512;  // that are summed at a time

INLINED uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINED float with_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};

// What the callers' numbers of dtypes mean; fp16 where the compiler has it.
template <class F>
void with_dtype(int dtype, F run) {
  if (dtype == 0) run(float{});
  if (dtype == 1) run(BFloat16{});
#ifdef __FLT16_MAX__
  if (dtype == 2) run(_Float16{});
#endif
}

INLINED float widened(float x) { return x; }

INLINED float widened(BFloat16 x) { return with_bits(uint32_t(x.bits) << 16); }

INLINED void round_to(float x, float& to) { to = x; }

#ifdef __FLT16_MAX__
INLINED float widened(_Float16 x) { return float(x); }

INLINED void round_to(float x, _Float16& to) { to = _Float16(x); }
#endif

INLINED void round_to(float x, BFloat16& to) {
  const uint32_t bits = bits_of(x), even = bits + 0x7FFF + (bits >> 16 & 1);
  to.bits = uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : even >> 16);
}

// Within 2 units of the last place. n = round(x / ln 2) by a sum whose last place is 1; 2^n in two factors, so that it
// neither overflows nor is flushed before the result is; of NaN all of it is NaN.
INLINED float exponential(float x) {
  constexpr float last_place_1 = 12582912.0f;  // 1.5 * 2^23
  const float inside = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
  const float shifted = inside * 1.44269504f + last_place_1, n = shifted - last_place_1;
  const float r = inside - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two pieces, the first of 10 bits
  const float cubes = (1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f;
  const float squares = ((cubes * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  const float power = squares * r * r + r + 1.0f;
  const int32_t exponent = int32_t(bits_of(shifted) - bits_of(last_place_1)), half = exponent >> 1;
  return power * with_bits(uint32_t(half + 127) << 23) * with_bits(uint32_t(exponent - half + 127) << 23);
}

INLINED float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

INLINED float silu(float x) { return x / (1.0f + exponential(-x)); }

// max(x, 0) - |x| / 2 * erfc(z), z = |x| / sqrt(2). With t = 1 / (1 + z / 2), erfc(z) = t exp(-z^2 + p(t)), where p was
// fitted to log(erfcx(z) / t): relative error 1e-7.
INLINED float gelu(float x) {
  const float size = x < 0.0f ? -x : x, z = size * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
  const float high = ((0.178984389f * t - 0.861317456f) * t + 1.56844509f) * t - 1.22489262f;
  const float low = ((high * t + 0.339147121f) * t - 0.211069152f) * t + 0.102886982f;
  const float p = ((low * t + 0.373248816f) * t + 1.00008059f) * t - 1.26551354f;
  const float left = 0.5f * size * (t * exponential(p - z * z));
  return x > 20.0f ? x : (x > 0.0f ? x : 0.0f) - left;
}

// -------------------------------------------------------------------------------------------------------- selection

// In the order of x: NaN above all, one zero.
int32_t ordered(float x) {
  if (std::isnan(x)) return std::numeric_limits<int32_t>::max();
  const int32_t bits = x == 0.0f ? 0 : int32_t(bits_of(x));
  return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

// The places of the `wanted` largest, descending, of equals the first one first.
void largest(const float* of, int64_t number, int64_t wanted, int32_t* keys, int32_t* places) {
  int64_t found = 0;
  for (int64_t place = 0; place < number; ++place) {
    const int32_t key = ordered(of[place]);
    if (found == wanted && (found == 0 || key <= keys[found - 1])) continue;
    int64_t to = found < wanted ? found++ : found - 1;
    for (; to > 0 && keys[to - 1] < key; --to) keys[to] = keys[to - 1], places[to] = places[to - 1];
    keys[to] = key, places[to] = int32_t(place);
  }
}

// ----------------------------------------------------------------------------------------------------------- layout

constexpr int64_t TRIED = 8;         // lengths, of the counts' quantiles
constexpr double WORTHWHILE = 0.95;  // of the time: a model of costs is not as exact as one that is less has to be

// What an expert's products cost with so many rows, in further rows of a batch: in one, alone, and as few rows are.
struct Costs {
  static constexpr int64_t NUMBER = 5, ROWS[NUMBER] = {1, 2, 4, 8, 40};
  double batch[NUMBER], alone[NUMBER], few[NUMBER - 1];

  // Between and behind two numbers of rows, along a line.
  static double of(const double* costs, int64_t rows) {
    int64_t last = 1;
    while (last + 1 < NUMBER && rows > ROWS[last]) ++last;
    const double each = (costs[last] - costs[last - 1]) / double(ROWS[last] - ROWS[last - 1]);
    return costs[last] + each * double(rows - ROWS[last]);
  }
};

// Rows of every expert to compute as one batch, the rest expert by expert; 0: all expert by expert. A product of one
// expert wakes threads for little work; a batch wakes them once but computes padding, and reads every expert's weight.
int64_t padded_length(const int64_t* counts, int64_t experts, const Costs& costs, int64_t few) {
  std::vector<int64_t> ascending(counts, counts + experts);
  std::sort(ascending.begin(), ascending.end());
  const auto cost = [&](int64_t length) {
    double sum = length ? experts * Costs::of(costs.batch, length) : 0.0;
    for (int64_t count : ascending)
      if (count > length) sum += Costs::of(count - length <= few ? costs.few : costs.alone, count - length);
    return sum;
  };
  if (ascending.empty() || !ascending.back()) return 0;
  int64_t best = 0;
  double least = cost(0) * WORTHWHILE;
  for (int64_t n = 0; n <= TRIED; ++n) {
    const int64_t length = ascending[(experts - 1) * n / TRIED];
    if (cost(length) < least) best = length, least = cost(length);
  }
  return best;
}

// ---------------------------------------------------------------------------------------------------------- few rows

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // of functions that are all inlined
#endif
constexpr int64_t LANES = 16, CHAINS = 2;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINED Floats loaded(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

INLINED Floats loaded(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// What rows of one expert share: a row of its weight. Each row's sum has the same order however many there are.
template <int ROWS, class T>
INLINED void dots(const T* weight, const T* x, int64_t k, float* sums) {
  Floats chains[ROWS][CHAINS];
  for (auto& of_row : chains) of_row[0] = of_row[1] = Floats{};
  int64_t i = 0;
  for (; i + LANES * CHAINS <= k; i += LANES * CHAINS) {
    const Floats first = loaded(weight + i), second = loaded(weight + i + LANES);
    for (int64_t row = 0; row < ROWS; ++row) {
      chains[row][0] += first * loaded(x + row * k + i);
      chains[row][1] += second * loaded(x + row * k + i + LANES);
    }
  }
  for (int64_t row = 0; row < ROWS; ++row) {
    const Floats lanes = chains[row][0] + chains[row][1];
    float sum = 0.0f;
    for (int64_t lane = 0; lane < LANES; ++lane) sum += lanes[lane];
    for (int64_t j = i; j < k; ++j) sum += widened(weight[j]) * widened(x[row * k + j]);
    sums[row] = sum;
  }
}

template <class T>
struct Few {
  const T *weight, *bias, *x;  // [n, k], [n] or none, [rows, k]
  T* out;                      // [rows, n]
  int64_t rows;
};

// Products of experts of few rows, all at once: a weight's rows are read once, by one thread, in their order.
template <class T>
void multiply_few(const std::vector<Few<T>>& experts, int64_t of_row, int64_t of_bias, int64_t n, int64_t k,
                  int threads) {
  constexpr int64_t AT_ONCE = 16;
  const int64_t parts = (n + AT_ONCE - 1) / AT_ONCE, all = int64_t(experts.size()) * parts;
#pragma omp parallel for schedule(static) num_threads(threads) if (all * AT_ONCE * k > SHARED)
  for (int64_t part = 0; part < all; ++part) {
    const Few<T>& of = experts[part / parts];
    const int64_t end = std::min(n, (part % parts + 1) * AT_ONCE);
    for (int64_t column = part % parts * AT_ONCE; column < end; ++column) {
      const T* weight = of.weight + column * of_row;
      const float added = of.bias ? widened(of.bias[column * of_bias]) : 0.0f;
      for (int64_t row = 0; row < of.rows;) {
        const T* x = of.x + row * k;
        float sums[8];
        int64_t done = 8;
        if (of.rows - row >= 8) dots<8>(weight, x, k, sums);
        else if (of.rows - row >= 4) dots<4>(weight, x, k, sums), done = 4;
        else if (of.rows - row >= 2) dots<2>(weight, x, k, sums), done = 2;
        else dots<1>(weight, x, k, sums), done = 1;
        for (int64_t i = 0; i < done; ++i) round_to(sums[i] + added, of.out[(row + i) * n + column]);
        row += done;
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------- activation

enum Activation { SILU, BY_SIGMOID, GELU, GELU_TANH, RELU, RELU2 };

struct Glu {
  int64_t kind, rows, columns, gate_stride, up_stride, step, out_stride, up_place;  // behind the gate; -1 without one
  float alpha, before, after, up_limit, up_offset;  // limits: of the gate before and after its function, of up
};

template <int KIND>
INLINED float activated(float gate, const Glu& how) {
  const float x = gate > how.before ? how.before : gate;
  float value = x;
  if (KIND == SILU) value = silu(x);
  if (KIND == BY_SIGMOID) value = x * sigmoid(how.alpha * x);
  if (KIND == GELU) value = gelu(x);
  if (KIND == GELU_TANH) value = x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));  // (1 + tanh(y)) / 2
  if (KIND == RELU) value = x < 0.0f ? 0.0f : x;
  if (KIND == RELU2) value = x < 0.0f ? 0.0f : x * x;
  return value > how.after ? how.after : value;
}

template <int KIND, int STEP, class T>
void activate_row(const T* gate, const T* up, T* out, const Glu& how) {
  if (up) {
#pragma omp simd
    for (int64_t i = 0; i < how.columns; ++i) {
      const float other = widened(up[i * STEP]);
      const float inside = other < -how.up_limit ? -how.up_limit : other > how.up_limit ? how.up_limit : other;
      round_to(activated<KIND>(widened(gate[i * STEP]), how) * (inside + how.up_offset), out[i]);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < how.columns; ++i) round_to(activated<KIND>(widened(gate[i * STEP]), how), out[i]);
  }
}

template <int KIND, class T>
void activate_rows(const T* gate, const T* up, T* out, const Glu& how, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (how.rows * how.columns > SHARED)
  for (int64_t r = 0; r < how.rows; ++r) {
    const T *gates = gate + r * how.gate_stride, *ups = up ? up + r * how.up_stride : up;
    if (how.step == 1)
      activate_row<KIND, 1>(gates, ups, out + r * how.out_stride, how);
    else
      activate_row<KIND, 2>(gates, ups, out + r * how.out_stride, how);
  }
}

template <class T>
void activate_by(const T* gate, const T* up, T* out, const Glu& how, int threads) {
  if (how.kind == SILU) activate_rows<SILU>(gate, up, out, how, threads);
  if (how.kind == BY_SIGMOID) activate_rows<BY_SIGMOID>(gate, up, out, how, threads);
  if (how.kind == GELU) activate_rows<GELU>(gate, up, out, how, threads);
  if (how.kind == GELU_TANH) activate_rows<GELU_TANH>(gate, up, out, how, threads);
  if (how.kind == RELU) activate_rows<RELU>(gate, up, out, how, threads);
  if (how.kind == RELU2) activate_rows<RELU2>(gate, up, out, how, threads);
}

// ------------------------------------------------------------------------------------------------------ combination

struct Sum {
  int64_t tokens, selected, columns, rows;
};

// In the order of k; `added` joins last. A pair whose place is no row is left out: what it has may be NaN.
template <class T>
void combine_rows(const T* rows, const int64_t* places, const float* weights, const T* added, T* out, const Sum& how,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (how.tokens * how.selected * how.columns > SHARED)
  for (int64_t t = 0; t < how.tokens; ++t) {
    float sums[COLUMNS];
    for (int64_t first = 0; first < how.columns; first += COLUMNS) {
      const int64_t number = std::min(COLUMNS, how.columns - first);
      bool begun = false;
      for (int64_t k = 0; k < how.selected; ++k) {
        const int64_t pair = t * how.selected + k, place = places[pair];
        if (place < 0 || place >= how.rows) continue;
        const T* row = rows + place * how.columns + first;
        const float weight = weights ? weights[pair] : 1.0f;
        if (begun) {
#pragma omp simd
          for (int64_t i = 0; i < number; ++i) sums[i] += widened(row[i]) * weight;
        } else {
#pragma omp simd
          for (int64_t i = 0; i < number; ++i) sums[i] = widened(row[i]) * weight;
        }
        begun = true;
      }
      if (!begun) std::fill_n(sums, number, 0.0f);
      if (added)
        for (int64_t i = 0; i < number; ++i) sums[i] += widened(added[t * how.columns + first + i]);
      T* to = out + t * how.columns + first;
#pragma omp simd
      for (int64_t i = 0; i < number; ++i) round_to(sums[i], to[i]);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ layer

struct Weight {
  const char* data;
  int64_t of_expert, of_row, of_column;  // strides, in elements
  const char* bias;
  int64_t of_bias, of_bias_column;
};

struct Layer {
  int64_t dtype, tokens, selected, hidden, columns, width;  // of the first product, and of what is activated
  const char* x;
  const float* weights;  // [T, K]
  int64_t on_input;
  Weight gate_up, up, down;  // up without data where there is none apart
  Glu glu;
};

struct Lots {
  int64_t number, experts, few;  // rows of an expert that are few
  int64_t *ends, *lengths, *counts, *order;
};

// A tensor of torch's on memory that is not its own.
class View {
 public:
  View(int64_t dtype, const char* data, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
    const int32_t name = dtype == 0 ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
    error = aoti_torch_create_tensor_from_blob(const_cast<char*>(data), sizes.size(), sizes.begin(), strides.begin(), 0,
                                               name, aoti_torch_device_type_cpu(), 0, &tensor);
  }
  View(const View&) = delete;
  ~View() {
    if (!error) aoti_torch_delete_tensor_object(tensor);
  }
  AtenTensorHandle tensor;
  AOTITorchError error;
};

class Run {
 public:
  Run(const Layer& layer, const Lots& lots) : layer_(layer), lots_(lots), size_(layer.dtype == 0 ? 4 : 2) {
    for (int64_t n = 0, first = 0; n < lots.number; first = lots.ends[n++]) {
      int64_t rows = lots.lengths[n] * (lots.ends[n] - first);
      for (int64_t e = first; e < lots.ends[n]; ++e) rows += std::max(lots.counts[e] - lots.lengths[n], int64_t(0));
      most_ = std::max(most_, rows);
      rows_ += rows;
    }
  }

  // Of places, pairs of rows; copies of tokens, both first results, what is activated of a lot.
  int64_t bytes() const {
    const int64_t columns = layer_.hidden + layer_.columns * (layer_.up.data ? 2 : 1) + layer_.width;
    return pairs() * 8 + most_ * 8 + most_ * columns * size_ + 8 * LINE;
  }

  // Of the results of all lots; those of a single one are where its copies of tokens were.
  int64_t bytes_of_results() const { return lots_.number > 1 ? rows_ * layer_.hidden * size_ : 0; }

  template <class T>
  int compute(char* memory, char* results, T* out, int threads) {
    const auto take = [&](int64_t bytes) {
      char* taken = memory + (LINE - reinterpret_cast<uintptr_t>(memory) % LINE) % LINE;
      memory = taken + bytes;
      return taken;
    };
    int64_t* places = reinterpret_cast<int64_t*>(take(pairs() * 8));
    int64_t* pair_of_row = reinterpret_cast<int64_t*>(take(most_ * 8));
    char* copies = take(most_ * layer_.hidden * size_);
    if (lots_.number <= 1) results = copies;
    char *gate_up = take(most_ * layer_.columns * size_), *up = nullptr;
    if (layer_.up.data) up = take(most_ * layer_.columns * size_);
    char* activated = take(most_ * layer_.width * size_);
    std::fill_n(places, pairs(), -1);
    int64_t pair = 0, row = 0;
    for (int64_t n = 0, first = 0; n < lots_.number; first = lots_.ends[n++]) {
      const Lot lot{first, lots_.ends[n] - first, lots_.lengths[n]};
      const int64_t rows = place(lot, pair, row, pair_of_row, places);
      gather<T>(pair_of_row, rows, reinterpret_cast<T*>(copies), threads);
      const int64_t hidden = layer_.hidden, columns = layer_.columns;
      if (int error = multiply<T>(lot, layer_.gate_up, copies, hidden, gate_up, columns, threads)) return error;
      if (up)
        if (int error = multiply<T>(lot, layer_.up, copies, hidden, up, columns, threads)) return error;
      activate<T>(rows, gate_up, up, activated, threads);
      char* to = results + row * hidden * size_;
      if (int error = multiply<T>(lot, layer_.down, activated, layer_.width, to, hidden, threads)) return error;
      row += rows;
    }
    const Sum how{layer_.tokens, layer_.selected, layer_.hidden, rows_};
    const float* weights = layer_.on_input ? nullptr : layer_.weights;
    combine_rows<T>(reinterpret_cast<const T*>(results), places, weights, nullptr, out, how, threads);
    return 0;
  }

 private:
  static constexpr int64_t LINE = 64;  // bytes of the cache

  struct Lot {
    int64_t first, experts, length;
  };

  int64_t pairs() const { return layer_.tokens * layer_.selected; }

  // Rows of a lot: the first `length` of each expert, padded with the first pair, then the others by expert.
  int64_t place(const Lot& lot, int64_t& pair, int64_t first_row, int64_t* pair_of_row, int64_t* places) const {
    int64_t past = lot.experts * lot.length;
    std::fill_n(pair_of_row, past, 0);
    for (int64_t e = 0; e < lot.experts; ++e)
      for (int64_t rank = 0; rank < lots_.counts[lot.first + e]; ++rank, ++pair) {
        const int64_t row = rank < lot.length ? e * lot.length + rank : past++;
        pair_of_row[row] = lots_.order[pair];
        places[lots_.order[pair]] = first_row + row;
      }
    return past;
  }

  template <class T>
  void gather(const int64_t* pair_of_row, int64_t rows, T* copies, int threads) const {
    const int64_t hidden = layer_.hidden;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * hidden > 4 * SHARED)
    for (int64_t row = 0; row < rows; ++row) {
      const T* token = reinterpret_cast<const T*>(layer_.x) + pair_of_row[row] / layer_.selected * hidden;
      T* copy = copies + row * hidden;
      if (layer_.on_input) {
        const float weight = layer_.weights[pair_of_row[row]];
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) round_to(widened(token[i]) * weight, copy[i]);
      } else {
        std::memcpy(copy, token, hidden * sizeof(T));
      }
    }
  }

  template <class T>
  void activate(int64_t rows, const char* gate_up, const char* up, char* activated, int threads) const {
    Glu how = layer_.glu;
    how.rows = rows;
    const T* gate = reinterpret_cast<const T*>(gate_up);
    const T* other = up ? reinterpret_cast<const T*>(up) : how.up_place < 0 ? nullptr : gate + how.up_place;
    activate_by(gate, other, reinterpret_cast<T*>(activated), how, threads);
  }

  // A batch of the first rows, and what is left of each expert by itself, or with others that have few.
  template <class T>
  int multiply(const Lot& lot, const Weight& weight, const char* x, int64_t k, char* out, int64_t n,
               int threads) const {
    const char* data = weight.data + lot.first * weight.of_expert * size_;
    const char* bias = weight.bias ? weight.bias + lot.first * weight.of_bias * size_ : nullptr;
    int64_t past = lot.experts * lot.length;
    if (past) {
      const View batch(layer_.dtype, x, {lot.experts, lot.length, k}, {lot.length * k, k, 1});
      const View matrices(layer_.dtype, data, {lot.experts, k, n}, {weight.of_expert, weight.of_column, weight.of_row});
      const View to(layer_.dtype, out, {lot.experts, lot.length, n}, {lot.length * n, n, 1});
      if (int error = batch.error + matrices.error + to.error) return error;
      if (bias) {
        const View added(layer_.dtype, bias, {lot.experts, 1, n}, {weight.of_bias, n, weight.of_bias_column});
        if (added.error) return added.error;
        if (int error = aoti_torch_cpu_baddbmm_out(to.tensor, added.tensor, batch.tensor, matrices.tensor, 1.0, 1.0))
          return error;
      } else if (int error = aoti_torch_cpu_bmm_out(to.tensor, batch.tensor, matrices.tensor)) {
        return error;
      }
    }
    std::vector<Few<T>> few;
    for (int64_t e = 0; e < lot.experts; ++e) {
      const int64_t rows = lots_.counts[lot.first + e] - lot.length;
      if (rows <= 0) continue;
      if (rows <= lots_.few && weight.of_column == 1) {
        const T* of_expert = reinterpret_cast<const T*>(data) + e * weight.of_expert;
        const T* added = bias ? reinterpret_cast<const T*>(bias) + e * weight.of_bias : nullptr;
        T* to = reinterpret_cast<T*>(out) + past * n;
        few.push_back({of_expert, added, reinterpret_cast<const T*>(x) + past * k, to, rows});
        past += rows;
        continue;
      }
      const View part(layer_.dtype, x + past * k * size_, {rows, k}, {k, 1});
      const View matrix(layer_.dtype, data + e * weight.of_expert * size_, {k, n}, {weight.of_column, weight.of_row});
      const View to(layer_.dtype, out + past * n * size_, {rows, n}, {n, 1});
      past += rows;
      if (int error = part.error + matrix.error + to.error) return error;
      if (bias) {
        const View added(layer_.dtype, bias + e * weight.of_bias * size_, {n}, {weight.of_bias_column});
        if (added.error) return added.error;
        if (int error = aoti_torch_cpu_addmm_out(to.tensor, added.tensor, part.tensor, matrix.tensor, 1.0, 1.0))
          return error;
      } else if (int error = aoti_torch_cpu_mm_out(to.tensor, part.tensor, matrix.tensor)) {
        return error;
      }
    }
    multiply_few(few, weight.of_row, weight.of_bias_column, n, k, threads);
    return 0;
  }

  const Layer& layer_;
  const Lots& lots_;
  const int64_t size_;
  int64_t most_ = 0, rows_ = 0;
};

}  // namespace

extern "C" {

int moe_has_fp16() {
#ifdef __FLT16_MAX__
  return 1;
#else
  return 0;
#endif
}

// Ids of the largest choices and their scores, or shares of the sum of these.
void moe_select(const float* choices, const float* scores, int64_t tokens, int64_t experts, int64_t selected,
                int shares, float* weights, int32_t* ids, int threads) {
#pragma omp parallel num_threads(threads) if (tokens * experts * 4 > SHARED)
  {
    std::vector<int32_t> keys(selected);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      float *of_token = weights + t * selected, sum = 0.0f;
      largest(choices + t * experts, experts, selected, keys.data(), ids + t * selected);
      for (int64_t k = 0; k < selected; ++k) sum += of_token[k] = scores[t * experts + ids[t * selected + k]];
      for (int64_t k = 0; shares && k < selected; ++k) of_token[k] /= sum;
    }
  }
}

// Counts of every expert and its pairs, `capacity` at the most, in their order, without those of no expert. Lots of
// neighbours, of about as many pairs, as few as have `in_a_lot` of them at the most, as the ends of their experts; and
// how many rows of each expert of a lot are a batch, by the costs, or none without. Then bytes of the memory that
// `moe_experts` needs, and of that for results of several lots. `mapped` is -1 without a map: one without entries has no
// address either, and holds no expert.
void moe_lay_out(const Layer* layer, const void* ids, int wide, const int64_t* map, int64_t mapped, int64_t capacity,
                 int64_t in_a_lot, const Costs* costs, Lots* lots, int64_t* bytes) {
  const int64_t pairs = layer->tokens * layer->selected, experts = lots->experts;
  int64_t *counts = lots->counts, *order = lots->order;
  std::vector<int64_t> expert_of(pairs), sums(experts + 1);
  std::fill_n(counts, experts, 0);
  for (int64_t p = 0; p < pairs; ++p) {
    int64_t expert = wide ? static_cast<const int64_t*>(ids)[p] : static_cast<const int32_t*>(ids)[p];
    if (mapped >= 0) expert = expert >= 0 && expert < mapped ? map[expert] : -1;
    const bool kept = expert >= 0 && expert < experts && counts[expert] < capacity;
    if (kept) ++counts[expert];
    expert_of[p] = kept ? expert : -1;
  }
  for (int64_t e = 0; e < experts; ++e) sums[e + 1] = sums[e] + counts[e];
  std::vector<int64_t> next(sums);
  for (int64_t p = 0; p < pairs; ++p)
    if (expert_of[p] >= 0) order[next[expert_of[p]]++] = p;
  const int64_t wanted = std::max((sums[experts] + in_a_lot - 1) / in_a_lot, int64_t(1));
  int64_t first = 0;
  lots->number = 0;
  for (int64_t n = 1; n <= wanted; ++n) {
    const int64_t least = (sums[experts] * n + wanted - 1) / wanted;
    const int64_t end = n == wanted ? experts : std::lower_bound(sums.begin() + 1, sums.end(), least) - sums.begin();
    if (end <= first) continue;
    lots->lengths[lots->number] = costs ? padded_length(counts + first, end - first, *costs, lots->few) : 0;
    lots->ends[lots->number++] = first = end;
  }
  const Run run(*layer, *lots);
  bytes[0] = run.bytes(), bytes[1] = run.bytes_of_results();
}

// The layer's result to `out [T, H]`; 0, or what torch says of a product that failed.
int moe_experts(const Layer* layer, const Lots* lots, char* memory, char* results, void* out, int threads) {
  Run run(*layer, *lots);
  return layer->dtype == 0 ? run.compute(memory, results, static_cast<float*>(out), threads)
                           : run.compute(memory, results, static_cast<BFloat16*>(out), threads);
}

// Experts that have so many rows each, to be timed: `weights [E, n, k]`, `x [E, rows, k]`.
void moe_few(int dtype, const void* weights, const void* x, void* out, int64_t experts, int64_t rows, int64_t n,
             int64_t k, int threads) {
  with_dtype(dtype, [&](auto of) {
    using T = decltype(of);
    if constexpr (sizeof(T) == 4 || std::is_same_v<T, BFloat16>) {
      std::vector<Few<T>> few;
      for (int64_t e = 0; e < experts; ++e)
        few.push_back({static_cast<const T*>(weights) + e * n * k, nullptr, static_cast<const T*>(x) + e * rows * k,
                       static_cast<T*>(out) + e * rows * n, rows});
      multiply_few(few, k, 0, n, k, threads);
    }
  });
}

void moe_activate(int dtype, const void* gate, const void* up, void* out, const Glu* how, int threads) {
  with_dtype(dtype, [&](auto of) {
    using T = decltype(of);
    activate_by(static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(out), *how, threads);
  });
}

void moe_combine(int dtype, const void* rows, const int64_t* places, const float* weights, const void* added, void* out,
                 const Sum* how, int threads) {
  with_dtype(dtype, [&](auto of) {
    using T = decltype(of);
    combine_rows(static_cast<const T*>(rows), places, weights, static_cast<const T*>(added), static_cast<T*>(out), *how,
                 threads);
  });
}
}
