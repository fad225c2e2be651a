#include "exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <chrono>
#include <cstring>
#include <thread>

namespace mmserve {

// What a rank says to the others, on cache lines of its own.
struct alignas(128) RankLine {
  std::atomic<uint32_t> arrived;   // the last meeting that it has come to
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `arrived` moves
  std::atomic<uint32_t> left;
  std::atomic<uint64_t> told[2];   // what it does, at even and at odd meetings
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

namespace {

constexpr int64_t kHeader = 4096;
constexpr int64_t kMostRanks = kHeader / static_cast<int64_t>(sizeof(RankLine));
constexpr int64_t kSlot = 256 * 1024;       // bytes of a piece: two ranks' fit in a second-level cache
constexpr int64_t kSharedSum = 16 * 1024;   // bytes from which three ranks or more sum a share of the piece each
constexpr int64_t kThreadBytes = 64 * 1024; // the least that a thread is given
constexpr int kSpins = 400;                 // pauses, about 20 us: what a peer in step needs
constexpr auto kYields = std::chrono::microseconds(1000);
constexpr auto kNap = std::chrono::milliseconds(20);  // a death is seen after so long

using Clock = std::chrono::steady_clock;

void pause_once() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleep until `word` is something else than `seen`, or a nap is over.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec nap = {0, std::chrono::nanoseconds(kNap).count()};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

bool reached(const std::atomic<uint32_t>& arrived, uint32_t step) {
  return static_cast<int32_t>(arrived.load(std::memory_order_acquire) - step) >= 0;  // steps may wrap around
}

bool has_ended(int process) {
  pollfd asked = {process, POLLIN, 0};
  return process >= 0 && poll(&asked, 1, 0) > 0;
}

// Calls f(begin, end) over ranges of `count` elements of `element` bytes, on as many threads as are worth it.
template <typename Function>
void over_elements(int64_t count, int64_t element, const Function& f) {
  at::parallel_for(0, count, kThreadBytes / element, f);
}

void copy(void* to, const void* from, int64_t count) {
  over_elements(count, 1, [=](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

void check_plain(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.device().is_cpu(), "ranks exchange contiguous tensors of the CPU");
}

// Calls f(offset, bytes) for each piece of a tensor.
template <typename Function>
void by_pieces(int64_t bytes, const Function& f) {
  for (int64_t at = 0; at < bytes; at += kSlot) f(at, std::min(kSlot, bytes - at));
}

}  // namespace

SharedExchange::SharedExchange(int memory, int64_t rank, int64_t size, const std::vector<int>& peers,
                               double timeout)
    : rank_(rank), size_(size), timeout_(timeout), process_(getpid()) {
  TORCH_CHECK(0 <= rank && rank < size && size <= kMostRanks, "rank ", rank, " of ", size, ", at most ", kMostRanks);
  TORCH_CHECK(static_cast<int64_t>(peers.size()) == size, peers.size(), " processes of ", size, " ranks");
  // More ranks than processors: whoever spins keeps the one from running that it waits for.
  spins_ = size <= static_cast<int64_t>(std::thread::hardware_concurrency());
  void* mapped = mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("the memory that ranks share can not be mapped");
  memory_ = static_cast<char*>(mapped);
  for (int peer : peers) peers_.push_back(peer < 0 ? peer : fcntl(peer, F_DUPFD_CLOEXEC, 0));
}

SharedExchange::~SharedExchange() {
  leave();
  munmap(memory_, bytes(size_));
  for (int peer : peers_)
    if (peer >= 0) close(peer);
}

int64_t SharedExchange::bytes(int64_t size) { return kHeader + 2 * size * kSlot; }

RankLine& SharedExchange::line(int64_t rank) const { return reinterpret_cast<RankLine*>(memory_)[rank]; }

char* SharedExchange::slot(int64_t rank) const { return memory_ + kHeader + (parity_ * size_ + rank) * kSlot; }

void SharedExchange::leave() {
  if (getpid() != process_) return;  // a copy of the process is not the rank
  line(rank_).left.store(1, std::memory_order_release);
  wake(line(rank_).arrived);
}

void SharedExchange::write(const void* from, int64_t count) {
  parity_ ^= 1;
  copy(slot(rank_), from, count);
}

void SharedExchange::begin(What what, int64_t bytes) {
  if (line(rank_).left.load(std::memory_order_relaxed))
    throw std::runtime_error("this rank has left the exchange");
  told_ = static_cast<uint64_t>(bytes) << 2 | what;
}

void SharedExchange::check_same() const {
  for (int64_t other = 0; other < size_; ++other)
    if (line(other).told[step_ & 1].load(std::memory_order_relaxed) != told_)
      throw std::runtime_error("rank " + std::to_string(other) + " exchanges something else than rank " +
                               std::to_string(rank_));
}

// What this rank had to write is written; wait until that is so for everyone.
void SharedExchange::meet() {
  ++step_;
  RankLine& own = line(rank_);
  own.told[step_ & 1].store(told_, std::memory_order_relaxed);
  own.arrived.store(step_);  // before `sleepers` is read: a sleeper counts itself first and looks at `arrived` then
  if (own.sleepers.load()) wake(own.arrived);
  try {
    for (int64_t other = 0; other < size_; ++other)
      if (!reached(line(other).arrived, step_)) wait_for(other);
    check_same();
  } catch (...) {
    leave();
    throw;
  }
}

void SharedExchange::wait_for(int64_t rank) {
  RankLine& other = line(rank);
  for (int i = 0; spins_ && i < kSpins; ++i) {
    if (reached(other.arrived, step_)) return;
    pause_once();
  }
  const auto began = Clock::now();
  while (spins_ && Clock::now() - began < kYields) {
    if (reached(other.arrived, step_)) return;
    sched_yield();
  }
  auto looked = began;
  while (!reached(other.arrived, step_)) {
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.arrived.load();
    if (static_cast<int32_t>(seen - step_) < 0 && !other.left.load()) sleep_on(other.arrived, seen);
    other.sleepers.fetch_sub(1);
    if (reached(other.arrived, step_)) return;
    const auto now = Clock::now();
    if (now - looked < kNap && !other.left.load()) continue;
    looked = now;
    check(rank);
    if (now - began > std::chrono::duration<double>(timeout_))
      throw std::runtime_error("rank " + std::to_string(rank) + " was silent for " +
                               std::to_string(std::chrono::duration_cast<std::chrono::seconds>(now - began).count()) +
                               " s");
    while_waiting();
  }
}

// Whether a rank that has not come still can.
void SharedExchange::check(int64_t rank) const {
  const bool left = line(rank).left.load(std::memory_order_acquire), ended = has_ended(peers_[rank]);
  if ((left || ended) && !reached(line(rank).arrived, step_))  // it may have come just before it went
    throw std::runtime_error("rank " + std::to_string(rank) + (ended ? "'s process has ended" : " has left"));
}

// The sum of all ranks' elements from `first` on, in the order of ranks, into `out`.
void SharedExchange::add(const Kernels& kernels, int64_t first, int64_t count, int64_t element, char* out) const {
  std::vector<const void*> parts(size_);
  for (int64_t other = 0; other < size_; ++other) parts[other] = slot(other) + first * element;
  over_elements(count, element,
                [&](int64_t begin, int64_t end) { kernels.sum(parts.data(), size_, out, begin, end); });
}

void SharedExchange::sum(const at::Tensor& tensor, const MaybeTensor& onto) {
  check_plain(tensor);
  check_element_type(tensor, "what ranks sum");
  if (onto) {
    check_plain(*onto);
    TORCH_CHECK(onto->sizes() == tensor.sizes() && onto->scalar_type() == tensor.scalar_type(), "a sum of ",
                tensor.scalar_type(), " ", tensor.sizes(), " onto ", onto->scalar_type(), " ", onto->sizes());
  }
  const int64_t element = tensor.element_size();
  const Kernels& kernels = kernels_for(element);
  begin(kSum, tensor.nbytes());
  by_pieces(tensor.nbytes(), [&](int64_t at, int64_t bytes) {
    char* piece = bytes_of(tensor) + at;
    const int64_t count = bytes / element;
    write(piece, bytes);
    meet();
    sum_piece(kernels, count, element, piece);
    if (!onto) return;
    const void* const both[] = {piece, bytes_of(*onto) + at};  // the piece is still in a cache
    over_elements(count, element, [&](int64_t begin, int64_t end) { kernels.sum(both, 2, piece, begin, end); });
  });
}

// All ranks' slots, into the piece.
void SharedExchange::sum_piece(const Kernels& kernels, int64_t count, int64_t element, char* piece) {
  if (size_ == 2 || count * element < kSharedSum) {  // two would send as much, and meet once more
    add(kernels, 0, count, element, piece);
    return;
  }
  // Each sums its share of the piece in its own slot, where nobody else reads it before; then all take all shares.
  const auto first = [&](int64_t rank) { return count * rank / size_; };
  const int64_t own = first(rank_);
  add(kernels, own, first(rank_ + 1) - own, element, slot(rank_) + own * element);
  meet();
  for (int64_t other = 0; other < size_; ++other) {
    const int64_t begins = first(other) * element;
    copy(piece + begins, slot(other) + begins, first(other + 1) * element - begins);
  }
}

void SharedExchange::gather(const at::Tensor& own, const std::vector<at::Tensor>& all) {
  check_plain(own);
  TORCH_CHECK(static_cast<int64_t>(all.size()) == size_, all.size(), " places for the tensors of ", size_, " ranks");
  for (const at::Tensor& place : all) {
    check_plain(place);
    TORCH_CHECK(place.nbytes() == own.nbytes(), "a place of ", place.nbytes(), " bytes for ", own.nbytes());
  }
  begin(kGather, own.nbytes());
  by_pieces(own.nbytes(), [&](int64_t at, int64_t bytes) {
    write(bytes_of(own) + at, bytes);
    meet();
    for (int64_t other = 0; other < size_; ++other) copy(bytes_of(all[other]) + at, slot(other), bytes);
  });
}

void SharedExchange::broadcast(const at::Tensor& tensor, int64_t source) {
  check_plain(tensor);
  TORCH_CHECK(0 <= source && source < size_, "rank ", source, " of ", size_);
  begin(kBroadcast, tensor.nbytes());
  by_pieces(tensor.nbytes(), [&](int64_t at, int64_t bytes) {
    write(bytes_of(tensor) + at, rank_ == source ? bytes : 0);
    meet();
    if (rank_ != source) copy(bytes_of(tensor) + at, slot(source), bytes);
  });
}

}  // namespace mmserve
