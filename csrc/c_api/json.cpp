#include "c_api/json.h"

#include <algorithm>
#include <charconv>
#include <set>

namespace qfx {
namespace {

constexpr int kDeepest = 64;
constexpr int64_t kMostValues = 1 << 20;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json whole() {
    Json found = value(0);
    skip();
    if (at_ < text_.size()) fail("there is more after its end");
    return found;
  }

 private:
  [[noreturn]] void fail(const char* why) const {
    throw Refused("it is not JSON that qfx writes: " + std::string(why) + ", at byte " +
                  std::to_string(at_));
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
  }

  bool take(char wanted) {
    skip();
    if (peek() != wanted || at_ >= text_.size()) return false;
    ++at_;
    return true;
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value(int depth) {
    if (depth > kDeepest) fail("it is nested too deeply");
    if (++values_ > kMostValues) fail("it has too many values");
    skip();
    if (take('{')) return object(depth);
    if (take('[')) return list(depth);
    Json found;
    if (peek() == '"') {
      found.kind = Json::Kind::kText;
      found.text = string();
    } else if (take_word("true")) {
      found.kind = Json::Kind::kBool, found.integer = 1;
    } else if (take_word("false")) {
      found.kind = Json::Kind::kBool;
    } else if (!take_word("null")) {
      number(&found);
    }
    return found;
  }

  Json list(int depth) {
    Json found;
    found.kind = Json::Kind::kList;
    if (take(']')) return found;
    do {
      found.items.push_back(value(depth + 1));
    } while (take(','));
    if (!take(']')) fail("a list does not end");
    return found;
  }

  Json object(int depth) {
    Json found;
    found.kind = Json::Kind::kObject;
    if (take('}')) return found;
    std::set<std::string> seen;
    do {
      skip();
      if (peek() != '"') fail("a key is not a string");
      found.names.push_back(string());
      if (!seen.insert(found.names.back()).second) fail("a key stands twice in one object");
      if (!take(':')) fail("a key has no value");
      found.items.push_back(value(depth + 1));
    } while (take(','));
    if (!take('}')) fail("an object does not end");
    return found;
  }

  void digits() {
    if (peek() < '0' || peek() > '9') fail("a value was expected");
    while (peek() >= '0' && peek() <= '9') ++at_;
  }

  void number(Json* found) {
    const size_t begin = at_;
    if (peek() == '-') ++at_;
    const bool zero = peek() == '0';
    const size_t first = at_;
    digits();
    if (zero && at_ - first > 1) fail("a number begins with 0");
    const char* end = text_.data() + at_;
    bool whole = true;
    if (peek() == '.') whole = false, ++at_, digits();
    if (peek() == 'e' || peek() == 'E') {
      whole = false, ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    const auto read = std::from_chars(text_.data() + begin, end, found->integer);
    found->kind = whole && read.ec == std::errc() ? Json::Kind::kInteger : Json::Kind::kReal;
    found->text = printable(text_.substr(begin, at_ - begin));
  }

  uint32_t hex4() {
    uint32_t code = 0;
    const std::string_view four = text_.substr(at_, 4);
    const auto read = std::from_chars(four.data(), four.data() + four.size(), code, 16);
    if (four.size() < 4 || read.ptr != four.data() + 4) fail("a \\u without four digits");
    at_ += 4;
    return code;
  }

  // In UTF-8.
  void append_escaped(std::string* to) {
    uint32_t code = hex4();
    if (code >= 0xd800 && code < 0xdc00) {
      if (!take_word("\\u")) fail("half a surrogate pair");
      const uint32_t low = hex4();
      if (low < 0xdc00 || low >= 0xe000) fail("half a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
      fail("half a surrogate pair");
    }
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    constexpr int kFirst[] = {0, 0xc0, 0xe0, 0xf0};
    to->push_back(static_cast<char>(kFirst[more] | code >> 6 * more));
    for (int i = more - 1; i >= 0; --i) {
      to->push_back(static_cast<char>(0x80 | (code >> 6 * i & 0x3f)));
    }
  }

  std::string string() {
    constexpr std::string_view kNames = "\"\\/bfnrt", kMeans = "\"\\/\b\f\n\r\t";
    std::string found;
    for (++at_; peek() != '"';) {
      if (at_ >= text_.size()) fail("a string does not end");
      const char c = text_[at_++];
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character");
      if (c != '\\') {
        found.push_back(c);
      } else if (take_word("u")) {
        append_escaped(&found);
      } else {
        const size_t which = at_ < text_.size() ? kNames.find(text_[at_]) : kNames.npos;
        if (which == kNames.npos) fail("an unknown escape");
        found.push_back(kMeans[which]);
        ++at_;
      }
    }
    ++at_;
    return found;
  }

  std::string_view text_;
  size_t at_ = 0;
  int64_t values_ = 0;
};

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kMost = 200;
  std::string found;
  for (const char c : text.substr(0, kMost)) {
    const bool plain = c >= 0x20 && c < 0x7f;
    found += plain ? c : '?';
  }
  return text.size() > kMost ? found + "..." : found;
}

Json parsed_json(std::string_view text) { return Parser(text).whole(); }

std::string Json::shown() const {
  switch (kind) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return integer != 0 ? "true" : "false";
    case Kind::kInteger:
      return std::to_string(integer);
    case Kind::kReal:
      return text;
    case Kind::kText:
      return std::string("'").append(printable(text)).append("'");
    case Kind::kList:
      return "a list of " + std::to_string(items.size());
    case Kind::kObject:
      return "an object of " + std::to_string(items.size());
  }
  return "";
}

int64_t Json::integer_in(int64_t least, int64_t most, const std::string& what) const {
  if (kind != Kind::kInteger || integer < least || integer > most) {
    throw Refused(what + " is " + shown() + ", expected an integer from " + std::to_string(least) +
                  " to " + std::to_string(most));
  }
  return integer;
}

const std::string& Json::as_text(const std::string& what) const {
  if (kind != Kind::kText) throw Refused(what + " is " + shown() + ", expected a string");
  return text;
}

const std::vector<Json>& Json::as_list(const std::string& what) const {
  if (kind != Kind::kList) throw Refused(what + " is " + shown() + ", expected a list");
  return items;
}

const Json& Json::as_object(const std::string& what) const {
  if (kind != Kind::kObject) throw Refused(what + " is " + shown() + ", expected an object");
  return *this;
}

const Json* Json::find(std::string_view name) const {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? nullptr : &items[static_cast<size_t>(found - names.begin())];
}

const Json& Json::at(std::string_view name) const {
  const Json* found = find(name);
  if (found == nullptr) throw Refused("it does not say '" + std::string(name) + "'");
  return *found;
}

}  // namespace qfx
