// Whether a packed weight is as it was packed. To read all of it at each call would take as long as
// the call, so it is read once, before its first use in this process: a package or file that was
// damaged is found there, by whatever way it came. What a thread packs it knows to be whole, until
// that memory is freed. Not seen is memory that changes later, nor a damaged copy of a weight at
// the address where a copy in memory of others was read and freed: `forget_whole` has all weights
// read again.
#pragma once

#include <cstdint>
#include <string>

namespace qfx::cpu {

// What a header says of what follows it.
struct Contents {
  uint64_t sum;    // checksum
  int64_t header;  // bytes before them
};

// What is wrong with a weight of `size` bytes whose header says this, or an empty string.
std::string fault_of_contents(const int8_t* data, int64_t size, const Contents& contents);

// The same, but of a weight that is known at this address it reads nothing.
std::string fault_at_first_use(const int8_t* data, int64_t size, const Contents& contents);

// Nothing is wrong with the weight at this address, which this thread has packed.
void know_whole(const int8_t* data, uint64_t contents);

// The memory at this address is to be freed: a weight that lies there later is another one.
void forget_whole(const void* data);

// Every weight is read again before its next use, on every thread.
void forget_whole();

}  // namespace qfx::cpu
