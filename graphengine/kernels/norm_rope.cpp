// rms_norm, embed and rope_write: the row-wise pieces between the linears.
#include <cmath>

#include "abi.h"
#include "team.h"

namespace {

// 1 / sqrt(mean(x^2) + eps): four interleaved accumulators, a fixed tree; depends on the row alone.
float inverse_rms(const float* x, int64_t H, float eps) {
  vf acc[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t i = 0;
  for (; i + 4 * VL <= H; i += 4 * VL)
    for (int j = 0; j < 4; j++) {
      vf v = vload(x + i + j * VL);
      acc[j] = vfma(v, v, acc[j]);
    }
  for (; i < H; i += VL) {
    vf v = H - i >= VL ? vload(x + i) : vload_part(x + i, H - i);
    acc[0] = vfma(v, v, acc[0]);
  }
  float sum = vsum(vadd(vadd(acc[0], acc[1]), vadd(acc[2], acc[3])));
  return 1.0f / std::sqrt(sum / static_cast<float>(H) + eps);
}

void norm_row(float* out, const float* x, const float* weight, int64_t H, float eps) {
  float scale = inverse_rms(x, H, eps);
  for (int64_t i = 0; i < H; i++) out[i] = (x[i] * scale) * weight[i];
}

// Half-split (Hugging Face Llama) rotation of one head; products and sums rounded separately, as
// the reference rounds them.
void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

template <typename T>
void store_row(T* out, const float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) from_float(x[i], out + i);
}

template <typename T>
void rope_write(float* qkv, T* kv_cache, const float* cos, const float* sin,
                const int32_t* positions, const int32_t* slot_mapping, int64_t num_tokens,
                int64_t Hq, int64_t Hkv, int64_t D, int64_t block_size, const float* q_norm_weight,
                const float* k_norm_weight, const float* eps) {
  int64_t width = (Hq + 2 * Hkv) * D, half = D / 2;
  int64_t plane = block_size * Hkv * D;
  launch(num_tokens * width, [=](const Team& team) {
    for (int64_t t = team.begin(num_tokens); t < team.end(num_tokens); t++) {
      float* row = qkv + t * width;
      int64_t p = positions[t];
      for (int64_t h = 0; h < Hq + Hkv; h++) {
        const float* weight = h < Hq ? q_norm_weight : k_norm_weight;
        float* head = row + h * D;
        if (weight) norm_row(head, head, weight, D, *eps);
        rotate(head, cos + p * half, sin + p * half, half);
      }
      int64_t slot = slot_mapping[t], block = slot / block_size, offset = slot % block_size;
      // Padding shares the slots of block 0, which nobody reads: threads must not store there at once.
      if (block == 0) continue;
      T* key = kv_cache + block * 2 * plane + offset * Hkv * D;
      store_row(key, row + Hq * D, Hkv * D);
      store_row(key + plane, row + (Hq + Hkv) * D, Hkv * D);
    }
  });
}

template <typename T>
void embed(float* out, const T* table, const int32_t* ids, int64_t M, int64_t H) {
  launch(M * H, [=](const Team& team) {
    for (int64_t m = team.begin(M); m < team.end(M); m++) {
      const T* row = table + static_cast<int64_t>(ids[m]) * H;
      for (int64_t i = 0; i < H; i++) out[m * H + i] = to_float(row[i]);
    }
  });
}

}  // namespace

void rms_norm(float* out, const float* x, const float* weight, int64_t M, int64_t H,
              const float* eps) {
  launch(M * H, [=](const Team& team) {
    for (int64_t m = team.begin(M); m < team.end(M); m++)
      norm_row(out + m * H, x + m * H, weight, H, *eps);
  });
}

#define DEFINE(T, SUFFIX)                                                                          \
  void embed_##SUFFIX(float* out, const T* table, const int32_t* ids, int64_t M, int64_t H) {      \
    embed<T>(out, table, ids, M, H);                                                               \
  }                                                                                                \
  void rope_write_##SUFFIX(float* qkv, T* kv_cache, const float* cos, const float* sin,            \
                           const int32_t* positions, const int32_t* slot_mapping, int64_t T_,      \
                           int64_t Hq, int64_t Hkv, int64_t D, int64_t block_size,                 \
                           const float* q_norm_weight, const float* k_norm_weight,                 \
                           const float* eps) {                                                     \
    rope_write<T>(qkv, kv_cache, cos, sin, positions, slot_mapping, T_, Hq, Hkv, D, block_size,    \
                  q_norm_weight, k_norm_weight, eps);                                              \
  }
DEFINE(bf16, bf16)
DEFINE(float, f32)
