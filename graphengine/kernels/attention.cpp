// paged_attention: softmax(q k^T / sqrt(D)) v over a paged cache, read in place.
//
// A context is cut into fixed chunks of absolute positions. A row's result of a chunk is computed by
// itself (attend.h), and results are combined strictly in chunk order. So the bits of a row depend on
// its query, its position and the keys and values it may see: not on the batch, the number of query
// rows, the threads, or which of the two schedules ran.
#include "attend.h"

#include <cmath>
#include <cstring>

#include "abi.h"
#include "team.h"

namespace {

template <typename T>
struct Problem {
  float* out;
  const float* qkv;
  const T* kv_cache;
  const int32_t* block_table;
  const int32_t* query_start_loc;
  const int32_t* positions;
  int64_t R, table_stride, Hq, Hkv, D, block_size, window;
  float* scratch;
  int64_t scratch_floats;

  int64_t begin_row(int64_t r) const { return query_start_loc[r]; }
  int64_t end_row(int64_t r) const { return query_start_loc[r + 1]; }
  int64_t rows(int64_t r) const { return end_row(r) - begin_row(r); }
  // First position that row t sees; the last is its own.
  int64_t first(int64_t t) const {
    return window > 0 && positions[t] >= window ? positions[t] - window + 1 : 0;
  }
  const float* query(int64_t t, int64_t head) const { return qkv + (t * (Hq + 2 * Hkv) + head) * D; }
  int64_t plane() const { return block_size * Hkv * D; }

  // The heads of a kv head go in blocks that fit the workspace.
  int64_t group() const { return Hq / Hkv; }
  int64_t block_heads() const { return group() < kMaxQueries ? group() : kMaxQueries; }
  int64_t blocks_per_kv_head() const { return (group() + kMaxQueries - 1) / kMaxQueries; }
  int64_t head_blocks() const { return Hkv * blocks_per_kv_head(); }
};

// Rows [t0, t1) of request r, query heads [h0, h1) of one kv head: at most kMaxQueries pairs.
struct Block {
  int64_t r, t0, t1, h0, h1, kv_head;
  int64_t heads() const { return h1 - h0; }
  int64_t index(int64_t t, int64_t h) const { return (t - t0) * heads() + h - h0; }
};

template <typename T>
Block make_block(const Problem<T>& p, int64_t r, int64_t t0, int64_t t1, int64_t head_block) {
  int64_t kv_head = head_block / p.blocks_per_kv_head();
  int64_t h0 = kv_head * p.group() + head_block % p.blocks_per_kv_head() * kMaxQueries;
  int64_t h1 = h0 + kMaxQueries, last = (kv_head + 1) * p.group();
  return Block{r, t0, t1, h0, h1 < last ? h1 : last, kv_head};
}

template <typename T>
void copy_widened(float* to, const T* from, int64_t D) {
  int64_t d = 0;
  for (; d + VL <= D; d += VL) vstore(to + d, vload(from + d));
  if (d == D) return;
  vstore(to + d, vzero());
  for (; d < D; d++) to[d] = to_float(from[d]);
}

// What a thread loads after the present chunk; chunk < 0: nothing.
struct Next {
  int64_t chunk, kv_head;
};

// Walks the positions of a request upwards: one division at the start instead of one a position.
template <typename T>
struct Cursor {
  const Problem<T>& p;
  const int32_t* block;
  int64_t offset, kv_head;

  Cursor(const Problem<T>& problem, int64_t r, int64_t position, int64_t head)
      : p(problem),
        block(p.block_table + r * p.table_stride + position / p.block_size),
        offset(position % p.block_size),
        kv_head(head) {}
  // Key of the position; its value lies one plane further.
  const T* key() const {
    return p.kv_cache + (int64_t{*block} * 2 * p.block_size + offset) * p.Hkv * p.D + kv_head * p.D;
  }
  void step() {
    if (++offset < p.block_size) return;
    offset = 0;
    block++;
  }
};

template <typename T>
void prefetch_row(const T* row, int64_t D) {
  for (const char* at = reinterpret_cast<const char*>(row),
                  *end = reinterpret_cast<const char*>(row + D);
       at < end; at += 64)
    __builtin_prefetch(at);
}

// Loads places [begin, end) of chunk c: no position that none of the queries may see is read. Pages
// defeat the hardware's prefetcher, so each row also fetches its like of the next chunk.
template <typename T>
void load_chunk(Workspace& work, const Problem<T>& p, const Block& b, int64_t c, int64_t begin,
                int64_t end, Next next) {
  int64_t width = padded(p.D);
  int64_t soon_end = next.chunk < 0 ? 0 : p.table_stride * p.block_size - next.chunk * kChunk;
  Cursor<T> now(p, b.r, c * kChunk + begin, b.kv_head);
  Cursor<T> soon(p, b.r, soon_end > begin ? next.chunk * kChunk + begin : 0, next.kv_head);
  for (int64_t j = begin; j < end; j++, now.step()) {
    if (j < soon_end) {
      prefetch_row(soon.key(), p.D);
      prefetch_row(soon.key() + p.plane(), p.D);
      soon.step();
    }
    copy_widened(work.key + j * width, now.key(), p.D);
    copy_widened(work.value + j * width, now.key() + p.plane(), p.D);
  }
}

// Results of a block's queries over chunk c; to(t, h) says where each goes. Rows that see nothing of
// the chunk are left out.
template <typename T, class To>
void do_chunk(Workspace& work, const Problem<T>& p, const Block& b, int64_t c, Next next,
              const To& to) {
  Query queries[kMaxQueries];
  int64_t count = 0, begin = kChunk, end = 0, width = padded(p.D);
  for (int64_t t = b.t0; t < b.t1; t++) {
    int64_t from = p.first(t) - c * kChunk, stop = p.positions[t] + 1 - c * kChunk;
    from = from > 0 ? from : 0;
    stop = stop < kChunk ? stop : kChunk;
    if (from >= stop) continue;
    begin = from < begin ? from : begin;
    end = stop > end ? stop : end;
    for (int64_t h = b.h0; h < b.h1; h++) {
      copy_widened(work.query + count * width, p.query(t, h), p.D);
      queries[count++] = Query{from, stop, to(t, h)};
    }
  }
  if (count == 0) return;
  load_chunk(work, p, b, c, begin, end, next);
  attend(work, queries, count, p.D, 1.0f / std::sqrt(static_cast<float>(p.D)));
}

Workspace& workspace() {
  static thread_local Workspace work;
  return work;
}

// One block over all its chunks, in order.
template <typename T>
void walk_block(const Problem<T>& p, const Block& b) {
  alignas(64) float states[kMaxQueries * (kMaxHeadDim + VL)];
  alignas(64) float parts[kMaxQueries * (kMaxHeadDim + VL)];
  auto at = [&](float* base, int64_t t, int64_t h) {
    return Partial{base + b.index(t, h) * Partial::floats(p.D), padded(p.D)};
  };
  int64_t first = p.first(b.t0), last = 0;
  for (int64_t t = b.t0; t < b.t1; t++) {
    first = p.first(t) < first ? p.first(t) : first;
    last = p.positions[t] > last ? p.positions[t] : last;
  }
  for (int64_t c = first / kChunk; c <= last / kChunk; c++) {
    auto is_first = [&](int64_t t) { return c == p.first(t) / kChunk; };
    do_chunk(workspace(), p, b, c, Next{c < last / kChunk ? c + 1 : -1, b.kv_head},
             [&](int64_t t, int64_t h) { return at(is_first(t) ? states : parts, t, h); });
    for (int64_t t = b.t0; t < b.t1; t++) {
      if (is_first(t) || p.first(t) / kChunk > c || p.positions[t] / kChunk < c) continue;
      for (int64_t h = b.h0; h < b.h1; h++) combine(at(states, t, h), at(parts, t, h));
    }
  }
  for (int64_t t = b.t0; t < b.t1; t++)
    for (int64_t h = b.h0; h < b.h1; h++) finish(p.out + (t * p.Hq + h) * p.D, at(states, t, h), p.D);
}

// Prefill-sized: threads share (request, rows, heads). Dealt in turn, since later rows cost more.
template <typename T>
void walk(const Problem<T>& p, const Team& team) {
  int64_t rows = kMaxQueries / p.block_heads(), unit = 0;
  for (int64_t r = 0; r < p.R; r++)
    for (int64_t t0 = p.begin_row(r); t0 < p.end_row(r); t0 += rows) {
      int64_t t1 = t0 + rows < p.end_row(r) ? t0 + rows : p.end_row(r);
      for (int64_t hb = 0; hb < p.head_blocks(); hb++)
        if (unit++ % team.size == team.tid) walk_block(p, make_block(p, r, t0, t1, hb));
    }
}

// The chunks [begin, end) that the rows of a request span.
struct Span {
  int64_t begin, end;
  int64_t chunks() const { return end - begin; }
};

template <typename T>
Span span_of(const Problem<T>& p, int64_t r) {
  if (p.rows(r) == 0) return {0, 0};
  Span span{p.first(p.begin_row(r)) / kChunk, 0};
  for (int64_t t = p.begin_row(r); t < p.end_row(r); t++) {
    int64_t first = p.first(t) / kChunk, end = p.positions[t] / kChunk + 1;
    span.begin = first < span.begin ? first : span.begin;
    span.end = end > span.end ? end : span.end;
  }
  return span;
}

// Few rows: threads share (request, chunk, heads); results wait in scratch, `stride` chunks for each
// (row, head), which then combines its own in order.
template <typename T>
void split(const Problem<T>& p, const Team& team, int64_t stride) {
  auto at = [&](const Span& span, int64_t t, int64_t head, int64_t c) {
    int64_t index = (t * p.Hq + head) * stride + c - span.begin;
    return Partial{p.scratch + index * Partial::floats(p.D), padded(p.D)};
  };
  int64_t units = 0, unit = 0;
  for (int64_t r = 0; r < p.R; r++) units += span_of(p, r).chunks() * p.head_blocks();
  int64_t begin = team.begin(units), end = team.end(units);
  for (int64_t r = 0; r < p.R && unit < end; r++) {
    Span span = span_of(p, r);
    int64_t here = span.chunks() * p.head_blocks();
    for (int64_t i = begin > unit ? begin - unit : 0; i < here && unit + i < end; i++) {
      int64_t c = span.begin + i / p.head_blocks(), after = (i + 1) % p.head_blocks();
      Next next{i + 1 < here ? span.begin + (i + 1) / p.head_blocks() : -1,
                after / p.blocks_per_kv_head()};
      Block b = make_block(p, r, p.begin_row(r), p.end_row(r), i % p.head_blocks());
      do_chunk(workspace(), p, b, c, next, [&](int64_t t, int64_t h) { return at(span, t, h, c); });
    }
    unit += here;
  }
  team.barrier();
  for (int64_t r = 0; r < p.R; r++) {
    Span span = span_of(p, r);
    for (int64_t i = p.begin_row(r) * p.Hq; i < p.end_row(r) * p.Hq; i++) {
      if (i % team.size != team.tid) continue;
      int64_t t = i / p.Hq, head = i % p.Hq, c = p.first(t) / kChunk;
      Partial state = at(span, t, head, c);
      while (++c <= p.positions[t] / kChunk) combine(state, at(span, t, head, c));
      finish(p.out + i * p.D, state, p.D);
    }
  }
}

template <typename T>
void paged_attention(const Problem<T>& p) {
  int64_t most_rows = 0, most_chunks = 0, work = 0;
  for (int64_t r = 0; r < p.R; r++) {
    int64_t rows = p.rows(r), chunks = span_of(p, r).chunks();
    most_rows = rows > most_rows ? rows : most_rows;
    most_chunks = chunks > most_chunks ? chunks : most_chunks;
    work += rows * chunks * kChunk * p.Hq * p.D;
  }
  int64_t needed = p.query_start_loc[p.R] * p.Hq * most_chunks * Partial::floats(p.D);
  bool use_split = most_rows * p.block_heads() <= kMaxQueries && needed <= p.scratch_floats;
  launch(work, [&](const Team& team) {
    if (use_split && team.size > 1) {
      split(p, team, most_chunks);
    } else {
      walk(p, team);
    }
  });
}

}  // namespace

#define DEFINE(T, SUFFIX)                                                                          \
  void paged_attention_##SUFFIX(                                                                   \
      float* out, const float* qkv, const T* kv_cache, const int32_t* block_table,                 \
      const int32_t* query_start_loc, const int32_t* positions, int64_t R, int64_t table_stride,   \
      int64_t Hq, int64_t Hkv, int64_t D, int64_t block_size, int64_t sliding_window,              \
      float* scratch, int64_t scratch_floats) {                                                    \
    paged_attention<T>(Problem<T>{out, qkv, kv_cache, block_table, query_start_loc, positions, R,  \
                                  table_stride, Hq, Hkv, D, block_size, sliding_window, scratch,   \
                                  scratch_floats});                                                \
  }
DEFINE(bf16, bf16)
DEFINE(float, f32)
