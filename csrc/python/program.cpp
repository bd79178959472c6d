// qfx._C.Program: a program of csrc/cpu/program, as Python makes and runs it.
#include "python/convert.h"
#include "python/parts.h"

namespace qfx::python {
namespace {

struct Owned {
  QfxProgram* program = nullptr;
  ~Owned() { qfx_api_free_program(program); }
};

QfxProgram* program_of(PyObject* self) { return held<Owned>(self).program; }

Owned* make(PyObject* args, PyObject* named) {
  PyObject *words = nullptr, *bytes = nullptr, *addresses = nullptr;
  read_arguments(args, named, "OOO:Program", {"words", "bytes", "addresses"}, &words, &bytes,
                 &addresses);
  const std::vector<int64_t> all = integers_of(words), sizes = integers_of(bytes),
                             places = integers_of(addresses);
  if (sizes.size() != places.size()) {
    PyErr_SetString(PyExc_ValueError, "not a program of this build: as many sizes as slots");
    throw Raised();
  }
  auto made = std::make_unique<Owned>();
  check(qfx_api_make_program(all.data(), static_cast<int64_t>(all.size()), sizes.data(),
                             places.data(), static_cast<int64_t>(sizes.size()), &made->program));
  return made.release();
}

// Lets Ctrl-C end a program: the interpreter looks at signals in its main thread alone.
int look_at_signals() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const int stop = PyErr_CheckSignals();
  PyGILState_Release(state);
  return stop;
}

// run(given) with all addresses, or run(places, given) with some of them.
Object run(PyObject* self, PyObject* args, PyObject* named) {
  PyObject *first = nullptr, *second = nullptr;
  read_arguments(args, named, "O|O:run", {"", ""}, &first, &second);
  if (second == nullptr) std::swap(first, second);
  const std::vector<int64_t> given = integers_of(second);
  const std::vector<int64_t> places =
      first == nullptr ? std::vector<int64_t>() : integers_of(first);
  const int64_t none_given = 0;
  const int64_t* chosen = first == nullptr ? nullptr : places.empty() ? &none_given : places.data();
  QfxStatus status = kQfxDone;
  {
    const Unlocked unlocked;
    status = qfx_api_run_program(program_of(self), chosen, static_cast<int64_t>(places.size()),
                                 given.data(), static_cast<int64_t>(given.size()), look_at_signals);
  }
  check(status);
  return none();
}

Object stream(PyObject* self, PyObject* args, PyObject* named) {
  const char* hint = nullptr;
  int64_t ahead = 0, streams = 1;
  read_arguments(args, named, "s|LL:stream", {"hint", "ahead", "streams"}, &hint, &ahead, &streams);
  check(qfx_api_stream_program(program_of(self), hint, ahead, streams));
  return none();
}

Object work(PyObject* self) { return object_of(qfx_api_program_work(program_of(self))); }

Object written(PyObject* self) {
  const auto rows = rows_of(
      [&](QfxTake take, void* to) { return qfx_api_program_written(program_of(self), take, to); });
  return Object::taken(PySet_New(list_of(rows.at(0).numbers).get()));
}

Object weights(PyObject* self) {
  const auto rows = rows_of(
      [&](QfxTake take, void* to) { return qfx_api_program_weights(program_of(self), take, to); });
  std::vector<Object> found;
  for (const ResultRow& row : rows) found.push_back(tuple_of(row.numbers));
  return list_of(std::move(found));
}

PyMethodDef methods[] = {
    method<run>(
        "run",
        "Runs it with the addresses of the slots that had none, run(given), or with some of these, "
        "run(places, given), by their places among them: the others are those of the run before, "
        "and "
        "it is a ValueError where there was none. One run at a time."),
    method<stream>("stream",
                   "stream(hint, ahead=0, streams=1)\n--\n\nHow the weights of few rows pass by "
                   "from now on, as "
                   "`tuning` names it; '' for what is set there. Changes no bit. ValueError for "
                   "what is out of "
                   "bounds. Not during a run."),
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef properties[] = {
    {"work", &property<work>, nullptr,
     "Multiply-accumulates of one run, and elements where it multiplies none.", nullptr},
    {"written", &property<written>, nullptr, "The slots that a run writes to.", nullptr},
    {"weights", &property<weights>, nullptr,
     "Of each linear: the address of its packed weight, its bytes, and the rows that it "
     "multiplies.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

void add_program(PyObject* module) {
  add_class<Owned, make>(
      module, "Program",
      "Instructions for slots of memory: the words of its instructions, the bytes of each slot, "
      "and "
      "its address, 0 where `run` gives it. Slot 0 is the program's own. ValueError for words that "
      "are no program.",
      {{Py_tp_methods, methods}, {Py_tp_getset, properties}});
}

}  // namespace qfx::python
