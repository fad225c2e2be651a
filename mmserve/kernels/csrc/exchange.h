// Ranks of one host that exchange tensors through memory which all of them have mapped.
//
//     page 0                          a line of words for each rank: how far it is, what it does, whether it has left
//     parity 0   slot 0 .. slot n-1   a piece of each rank's tensor
//     parity 1   slot 0 .. slot n-1   the next one
//
// For a piece each rank writes its own slot and comes to a meeting; when all have come, it reads the others' slots. The
// next piece takes the other parity, so nobody writes into a slot that somebody still reads: a slot is written again two
// pieces later, after a meeting to which all have come when they were done with it.
#pragma once

#include <functional>
#include <vector>

#include "host.h"

namespace mmserve {

struct RankLine;

// One rank's end. Every method is called by all ranks in the same order, with tensors of the same size, contiguous.
// Throws std::runtime_error if a rank has left, has died or is silent, or if ranks ask for different things; the
// exchange is over then, for all of them.
class SharedExchange {
 public:
  // `memory`: a file of bytes(size) zeros. `peers`: each rank's process, as a descriptor that can be read when it has
  // ended, or -1 where there is nobody to watch; they stay the caller's. `timeout`: seconds of silence.
  SharedExchange(int memory, int64_t rank, int64_t size, const std::vector<int>& peers, double timeout);
  ~SharedExchange();
  SharedExchange(const SharedExchange&) = delete;
  SharedExchange& operator=(const SharedExchange&) = delete;

  static int64_t bytes(int64_t size);

  // The sum over all ranks, in the order of ranks, float or bf16, in place; bf16 is summed in float and rounded once.
  // `onto`, of the same shape and type, is added to the sum afterwards and rounded again: it need not be equal on ranks.
  void sum(const at::Tensor& tensor, const MaybeTensor& onto);
  // all[r] is made rank r's `own`.
  void gather(const at::Tensor& own, const std::vector<at::Tensor>& all);
  // The source's tensor, in place.
  void broadcast(const at::Tensor& tensor, int64_t source);
  // Whoever waits for this rank, or will, hears that it has left.
  void leave();

  // Called now and then by a rank that waits; what it throws ends the exchange.
  std::function<void()> while_waiting = [] {};

 private:
  enum What : uint64_t { kSum = 1, kGather = 2, kBroadcast = 3 };

  RankLine& line(int64_t rank) const;
  char* slot(int64_t rank) const;  // for this piece
  void write(const void* from, int64_t count);  // a new piece begins
  void meet();
  void wait_for(int64_t rank);
  void check(int64_t rank) const;
  void begin(What what, int64_t bytes);
  void check_same() const;
  void sum_piece(const Kernels& kernels, int64_t count, int64_t element, char* piece);
  void add(const Kernels& kernels, int64_t first, int64_t count, int64_t element, char* out) const;

  char* memory_;
  int64_t rank_, size_;
  std::vector<int> peers_;
  double timeout_;
  bool spins_;
  int process_;
  uint32_t step_ = 0;  // meetings so far
  int64_t parity_ = 0;
  uint64_t told_ = 0;
};

}  // namespace mmserve
