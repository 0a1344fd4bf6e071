// Work that the threads of a team share: each goes through a part of its own, then helps the others.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace pe {

// Pieces [begin, end) of the work, numbered from 0.
struct Pieces {
  uint64_t begin, end;
  uint64_t count() const { return end - begin; }
};

// A thread's part is one word: what is left of it, and in which turn. The owner takes from the front, others take half
// of the rest from the back, each with one compare-and-exchange: nobody waits for a line that others write but at the
// end, and what a thread reads is one ascending stream. (A counter that all take from cost SmolLM2-135M, whose ops are
// 10 to 40 us short, a tenth of its speed on 2 threads.)
//
// All threads call `run` equally often, and all meet between two calls. So a word of another turn is one of the call
// before, whose owner has not come yet, and all of its part is left. A word that was exchanged is true whatever it was
// in between, because it says all there is to say about the part.
class WorkShare {
 public:
  explicit WorkShare(int threads) : parts_(static_cast<size_t>(threads)) {}

  // Calls body(begin, end) for ranges of [0, count), all of them together, each in multiples of `grain`, on whichever
  // thread; ends early where stop() says so. `streams`: a quarter of a part at once, then less, for work that ends a
  // stream of memory with every call; else one piece.
  template <class Stop, class F>
  void run(int64_t count, int64_t grain, int thread, bool streams, Stop&& stop, F&& body) {
    const uint64_t threads = parts_.size(), me = static_cast<uint64_t>(thread);
    while ((count + grain - 1) / grain > static_cast<int64_t>(kMostPieces)) grain *= 2;
    const auto all = static_cast<uint64_t>((count + grain - 1) / grain);
    const auto whole = [&](uint64_t t) { return Pieces{all * t / threads, all * (t + 1) / threads}; };
    const auto front = [&](Pieces left) {
      const uint64_t middle = left.begin + (streams ? std::max<uint64_t>(1, left.count() / 4) : 1);
      return std::pair{Pieces{left.begin, middle}, Pieces{middle, left.end}};
    };
    const auto back = [](Pieces left) {
      const uint64_t middle = left.begin + left.count() / 2;
      return std::pair{Pieces{middle, left.end}, Pieces{left.begin, middle}};
    };
    Part& own = parts_[me];
    const uint64_t turn = ++own.turns & kTurns;
    uint64_t word = own.left.load(std::memory_order_relaxed);
    if (turn_of(word) != turn)  // else somebody was here already
      own.left.compare_exchange_strong(word, word_of(turn, whole(me)), std::memory_order_relaxed);
    for (;;) {
      const Pieces mine = take(own, turn, whole(me), front);
      if (mine.count() > 0) {
        if (stop()) return;
        body(static_cast<int64_t>(mine.begin) * grain, std::min(static_cast<int64_t>(mine.end) * grain, count));
        continue;
      }
      Pieces more{0, 0};
      for (uint64_t i = 1; i < threads && more.count() == 0; ++i) {
        const uint64_t other = (me + i) % threads;
        more = take(parts_[other], turn, whole(other), back);
      }
      if (more.count() == 0) return;
      own.left.store(word_of(turn, more), std::memory_order_relaxed);  // where others may take of it again
    }
  }

 private:
  struct alignas(128) Part {  // a line, and its neighbour that may be fetched with it
    std::atomic<uint64_t> left{0};
    uint64_t turns = 0;  // of the owner
  };
  static constexpr int kPieceBits = 28;
  static constexpr uint64_t kMostPieces = (uint64_t{1} << kPieceBits) - 1, kTurns = 255;

  static uint64_t word_of(uint64_t turn, Pieces left) {
    return turn << (2 * kPieceBits) | left.begin << kPieceBits | left.end;
  }
  static uint64_t turn_of(uint64_t word) { return word >> (2 * kPieceBits); }

  // Takes split(left).first and leaves split(left).second; nothing where nothing is left.
  template <class Split>
  static Pieces take(Part& part, uint64_t turn, Pieces whole, Split&& split) {
    uint64_t word = part.left.load(std::memory_order_relaxed);
    for (;;) {
      const Pieces left = turn_of(word) == turn ? Pieces{word >> kPieceBits & kMostPieces, word & kMostPieces} : whole;
      if (left.count() == 0) return {0, 0};
      const auto [taken, rest] = split(left);
      if (part.left.compare_exchange_weak(word, word_of(turn, rest), std::memory_order_relaxed)) return taken;
    }
  }

  std::vector<Part> parts_;
};

}  // namespace pe
