"""Defects of packed weights: the cache, and what tells that a weight has changed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CACHE = (
    Mutant(
        "a step of an optimizer is not noticed",
        old="    register_optimizer_step_post_hook(stepped)",
        new="    pass",
        tests=("test_a_fused_step_on_one_element_is_seen",),
    ),
    Mutant(
        "a write to a weight is not noticed",
        old="return any(known.unchanged((weight,)) for known in self._known)",
        new="return bool(self._known)",
        tests=("test_change_is_seen",),
    ),
    Mutant(
        "invalidate does not reach the wrapper",
        old="if found is None or not found.current:",
        new="if found is None:",
        tests=("test_the_cache_is_asked_after_an_invalidation",),
    ),
    Mutant(
        "a refreshed pack is compared with the content of the one before",
        old="            entry.content = content\n",
        new="",
        tests=("test_a_weight_is_packed_again_once_if_its_content_has_changed",),
    ),
    Mutant(
        "the strides of a weight are not in the cache's key",
        old="*where, tensor.shape, tensor.stride(), tensor.dtype)",
        new="*where, tensor.shape, (), tensor.dtype)",
        tests=("test_a_parameter_and_its_transpose_in_one_memory_are_two_weights",),
    ),
    Mutant(
        "the packing of a weight is not in the cache's key",
        old="(*_in_storage(weight), view, packing)",
        new="(*_in_storage(weight), view)",
        tests=("test_recipes_have_their_own_packed_weights_which_follow_the_weight",),
    ),
    Mutant(
        "an optimizer marks the weights that it does not train",
        old="act(p for p in parameters if p.requires_grad or p.grad is not None)",
        new="act(parameters)",
        tests=("test_the_frozen_base_of_adapters_is_packed_once",),
    ),
    Mutant(
        "a module's pack outlives an optimizer's step",
        old="if before is None or self._epoch != epoch or not",
        new="if before is None or not",
        tests=("test_never_stale",),
    ),
    Mutant(
        "a copied module has the pack of its original",
        old="def __reduce__(self) -> Any:\n        return Memo, ()",
        new="def reduce(self) -> Any:\n        return Memo, ()",
        tests=("test_copies_and_pickles_start_empty",),
    ),
    Mutant(
        "a new wrapper trusts the packs of the cache",
        old="if before is None or before.written_unseen(arguments):",
        new="if before is not None and before.written_unseen(arguments):",
        tests=("test_a_new_compilation_trusts_no_pack",),
    ),
    Mutant(
        "a write that is seen says nothing of other weights",
        old="if before is None or before.written_unseen(arguments):",
        new="if before is None:",
        tests=("test_one_seen_write_makes_a_call_compare_all_weights",),
    ),
    Mutant(
        "tensors that share memory stay known when it is packed anew",
        old="            entry.forget()  # the other tensors that share this memory\n",
        new="",
        tests=("test_no_parameter_is_known_when_another_has_its_memory_packed_anew",),
    ),
    Mutant(
        "a refreshed pack is elsewhere",
        old="old.copy_(new)",
        new="old.data = new",
        tests=("test_packed_buffers_keep_their_address",),
    ),
    Mutant(
        "packs outlive their weights",
        old="if ref.expired()]:",
        new="if not ref]:",
        tests=("test_dead_weights_are_forgotten",),
    ),
    Mutant(
        "sets of weights that died are kept",
        old="if not k.dead}",
        new="if k}",
        tests=("test_sets_of_weights_that_died_are_forgotten",),
    ),
    Mutant(
        "calls that find a buffer rewritten are not counted",
        old="return Counter({i: counts[i] + 1 for i",
        new="return Counter({i: 1 for i",
        tests=("test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph",),
    ),
    Mutant(
        "parameters that change are packed at every call",
        old="for i in fresh if not isinstance(arguments[i], nn.Parameter)})",
        new="for i in fresh})",
        tests=("test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph",),
    ),
    Mutant(
        "packing at every call has no price",
        old="more = cost.packing(work)",
        new="more = 0.0",
        tests=("test_packing_at_every_call_has_its_price",),
    ),
    Mutant(
        "torch._dynamo.reset() leaves what is known of rewritten buffers",
        old="    _REWRITTEN.clear()",
        new="    pass",
        tests=("test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph",),
    ),
)
STAMPS = (
    Mutant(
        "the wrapper does not look at versions",
        old="(!stamp.version || reader_.version(weight) == *stamp.version) &&",
        new="",
        tests=("test_a_version_tells_of_an_element_that_no_sample_has",),
    ),
    Mutant(
        "the wrapper does not look at addresses",
        old="weight == stamp.tensor && reader_.address(weight) == stamp.address &&",
        new="weight == stamp.tensor &&",
        tests=("test_a_changed_weight_is_noticed",),
    ),
    Mutant(
        "the wrapper takes another tensor for the weight",
        old="return weight == stamp.tensor &&",
        new="return",
        tests=("test_another_tensor_with_the_same_storage_is_another",),
    ),
    Mutant(
        "the wrapper takes a new storage for a dead one",
        old="reader_.storage(weight).is(referent(stamp.storage));",
        new="true;",
        tests=("test_a_storage_in_the_place_of_a_dead_one_is_another",),
    ),
    Mutant(
        "the wrapper does not look at the weights' memory",
        old="if (stamp.sample.hash() != stamp.hash) return false;",
        new="",
        tests=("test_a_merge_is_seen", "test_change_is_seen"),
    ),
    Mutant(
        "a sample has nothing of the last rows",
        old="for (int64_t place = 0; place < kPlaces; ++place) {",
        new="for (int64_t place = 0; place + 1 < kPlaces; ++place) {",
        tests=("test_a_merge_is_seen",),
    ),
    Mutant(
        "a sample of short rows has one row a place",
        old="const int64_t neighbours = (kLine + length - 1) / length;",
        new="const int64_t neighbours = 1;",
        tests=("test_a_sample_is_six_cache_lines_or_all_of_a_tensor",),
    ),
    Mutant(
        "a sample of rows that lie apart reads what is between",
        old="if (moves) axes.emplace_back(region.sizes[i], region.strides[i] * region.element);",
        new="if (moves) axes.emplace_back(region.sizes[i], region.element);",
        tests=("test_a_snapshot_looks_at_the_tensor_and_at_nothing_else",),
    ),
    Mutant(
        "the content's hash leaves out the tail",
        old="if (count == 0) return;",
        new="if (count < sizeof words) return;",
        tests=("test_the_content_is_all_of_a_tensor",),
    ),
    Mutant(
        "the content's hash forgets what was before",
        old="lanes_[i] = mixed(lanes_[i], words[i]);\n    }\n    if",
        new="lanes_[i] = mixed(uint64_t{0}, words[i]);\n    }\n    if",
        tests=("test_the_content_is_all_of_a_tensor",),
    ),
)
CACHING = (*CACHE, *STAMPS)
