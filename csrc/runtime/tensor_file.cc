// Packed tensors to a file and back: written one behind the other, mapped read-only, verified on all threads.
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "core/checksum.h"
#include "core/memory.h"
#include "core/status.h"
#include "runtime/backend.h"

using namespace pe;

namespace {

// A part of a tensor's data that has a checksum of its own.
struct Block {
  const uint8_t* data;
  size_t bytes;
  uint64_t sum;
};

void append_blocks(std::vector<Block>& blocks, const Tensor& t) {
  const size_t bytes = t.size() - sizeof(TensorHeader);
  for (size_t at = 0; at < bytes; at += kChecksumBlock)
    blocks.push_back({t.view().data + at, std::min(kChecksumBlock, bytes - at), 0});
}

// As `checksum`, from the blocks of the tensor that begin at `next`, which moves past them.
uint64_t combine(const std::vector<Block>& blocks, size_t& next, const Tensor& t) {
  const size_t bytes = t.size() - sizeof(TensorHeader);
  uint64_t sum = bytes;
  for (size_t at = 0; at < bytes; at += kChecksumBlock) sum = checksum_mix(sum, blocks[next++].sum);
  return sum;
}

// Makes the pages of a mapped file present, so that a part that cannot be read is an error here and not a SIGBUS when
// it is touched. Called on all threads: it allocates nothing.
bool populate(int fd, uint64_t offset, const uint8_t* data, size_t bytes) {
#ifdef MADV_POPULATE_READ
  static const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data), page = address / page_bytes * page_bytes;
  int done;
  do done = madvise(reinterpret_cast<void*>(page), bytes + (address - page), MADV_POPULATE_READ);
  while (done != 0 && (errno == EINTR || errno == EAGAIN));
  if (done == 0) return true;
  if (errno != EINVAL) return false;
#endif
  uint8_t read[16 << 10];  // kernels before 5.14: reading the file shows whether its pages can be read
  for (size_t at = 0; at < bytes;) {
    const ssize_t count = pread(fd, read, std::min(bytes - at, sizeof read), static_cast<off_t>(offset + at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    at += static_cast<size_t>(count);
  }
  return true;
}

void write_all(int fd, uint64_t offset, iovec* parts, size_t count) {
  while (count > 0) {
    const ssize_t done = pwritev(fd, parts, static_cast<int>(count), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0)
      fail(PE_RESOURCE, "%s at byte %llu", std::strerror(done < 0 ? errno : ENOSPC),
           static_cast<unsigned long long>(offset));
    offset += static_cast<uint64_t>(done);
    auto left = static_cast<size_t>(done);  // a call may write less than it was given
    for (; count > 0 && left >= parts->iov_len; --count) left -= parts++->iov_len;
    if (count == 0) return;
    parts->iov_base = static_cast<uint8_t*>(parts->iov_base) + left;
    parts->iov_len -= left;
  }
}

// Writes what it is given one behind the other, a huge page of the file per call: a file system with large folios
// (Linux: ext4 from 6.16, xfs from 5.18) then keeps it in huge pages, and a map of it reads as fast as other memory.
// From pages of 4 KiB a decode step reads 6 to 16 % slower (Zen 4). What is added must stay until `flush`.
class FileWriter {
 public:
  FileWriter(int fd, uint64_t offset) : fd_(fd), offset_(offset) {}

  void add(void* data, size_t bytes) {
    auto* from = static_cast<uint8_t*>(data);
    while (bytes > 0) {
      const size_t part = std::min(bytes, kHugePage - static_cast<size_t>((offset_ + pending_) % kHugePage));
      parts_.push_back({from, part});
      from += part;
      bytes -= part;
      pending_ += part;
      if ((offset_ + pending_) % kHugePage == 0 || parts_.size() == kMostParts) flush();
    }
  }
  void flush() {
    write_all(fd_, offset_, parts_.data(), parts_.size());
    offset_ += pending_;
    pending_ = 0;
    parts_.clear();
  }
  uint64_t offset() const { return offset_; }

 private:
  static constexpr size_t kMostParts = 1024;  // of a call, IOV_MAX
  int fd_;
  uint64_t offset_, pending_ = 0;
  std::vector<iovec> parts_;
};

}  // namespace

uint64_t pe_backend::write_tensors(const pe_tensor_file& file) {
  FileWriter writer(file.fd, file.offset);
  std::vector<TensorHeader> headers(static_cast<size_t>(file.count));
  for (size_t i = 0; i < headers.size(); ++i) {
    const Tensor& t = tensor(file.ids[i]);
    std::vector<Block> blocks;
    append_blocks(blocks, t);
    std::atomic<size_t> next{0};
    team.run([&](int) {
      for (size_t b; (b = next.fetch_add(1)) < blocks.size();)
        blocks[b].sum = checksum_block(blocks[b].data, blocks[b].bytes);
    });
    headers[i] = t.header();
    size_t first = 0;
    headers[i].checksum = combine(blocks, first, t);
    writer.add(&headers[i], sizeof headers[i]);
    writer.add(t.view().data, t.size() - sizeof headers[i]);
  }
  writer.flush();
  return writer.offset() - file.offset;
}

std::vector<std::shared_ptr<Tensor>> pe_backend::map_tensors(const pe_tensor_file& file) {
  struct stat status;
  if (fstat(file.fd, &status) != 0) fail(PE_FORMAT, "%s", std::strerror(errno));
  const auto bytes = static_cast<size_t>(status.st_size);
  size_t end = file.offset;
  for (int32_t i = 0; i < file.count && end <= bytes; ++i) end += tensor_size(file.descs[i]);
  if (end != bytes) fail(PE_FORMAT, "%zu bytes; expected %zu", bytes, end);
  const auto memory = std::make_shared<Memory>(Memory::of_file(file.fd, end));

  // Headers are read first, where their pages are known to be there.
  std::vector<std::shared_ptr<Tensor>> made;
  std::vector<Block> blocks;
  size_t at = file.offset;
  for (int32_t i = 0; i < file.count; ++i) {
    if (!populate(file.fd, at, memory->data() + at, sizeof(TensorHeader)))
      fail(PE_FORMAT, "unreadable at byte %zu", at);
    made.push_back(std::make_shared<Tensor>(file.descs[i], memory, at));
    append_blocks(blocks, *made.back());
    at += made.back()->size();
  }
  std::atomic<size_t> next{0};
  std::atomic<bool> unreadable{false};
  team.run([&](int) {
    for (size_t b; (b = next.fetch_add(1)) < blocks.size() && !unreadable;) {
      Block& block = blocks[b];
      const auto offset = static_cast<uint64_t>(block.data - memory->data());
      if (populate(file.fd, offset, block.data, block.bytes))
        block.sum = checksum_block(block.data, block.bytes);
      else
        unreadable = true;
    }
  });
  if (unreadable) fail(PE_FORMAT, "a part of the file cannot be read");
  size_t first = 0;
  for (size_t i = 0; i < made.size(); ++i)
    if (combine(blocks, first, *made[i]) != made[i]->header().checksum)
      fail(PE_FORMAT, "tensor %zu of %zu: its bytes are not those that were written", i + 1, made.size());
  return made;
}
