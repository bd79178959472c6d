// How a call of api.h answers: its exceptions become a status and a sentence, its results rows.
#pragma once

#include <array>
#include <new>
#include <span>
#include <stdexcept>
#include <string>

#include "api/api.h"

namespace qfx {

class WrongType final : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The caller's `poll` ended a run.
struct Stopped {};

// Notes the sentence for qfx_api_error.
QfxStatus failed(QfxStatus status, const char* why) noexcept;

template <typename F>
QfxStatus answer(const F& f) noexcept {
  try {
    f();
    return kQfxDone;
  } catch (const Stopped&) {
    return kQfxStopped;
  } catch (const std::bad_alloc&) {
    return failed(kQfxNoMemory, "out of memory. A small allocation failed");
  } catch (const WrongType& why) {
    return failed(kQfxWrongType, why.what());
  } catch (const std::out_of_range& why) {
    return failed(kQfxWrongIndex, why.what());
  } catch (const std::logic_error& why) {
    return failed(kQfxWrongValue, why.what());
  } catch (const std::exception& why) {
    return failed(kQfxFailed, why.what());
  } catch (...) {
    return failed(kQfxFailed, "an error without a text");
  }
}

class Rows {
 public:
  Rows(QfxTake take, void* to) : take_(take), to_(to) {}

  void add(std::span<const int64_t> numbers) const { send({}, numbers); }
  void add(const char* text, std::span<const int64_t> numbers = {}) const { send({text}, numbers); }
  void add(const char* first, const char* second, std::span<const int64_t> numbers) const {
    send({first, second}, numbers);
  }

 private:
  void send(std::array<const char*, 3> texts, std::span<const int64_t> numbers) const {
    take_(to_, texts.data(), numbers.data(), static_cast<int64_t>(numbers.size()));
  }

  QfxTake take_;
  void* to_;
};

}  // namespace qfx
