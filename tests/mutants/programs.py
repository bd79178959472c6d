"""Defects of programs: what they share with others, what is read of their words."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PROGRAMS = (
    Mutant(
        "a query sees a place too few",
        old="ones[:, size - window : size] = True",
        new="ones[:, size - window + 1 : size] = True",
        tests=("test_a_query_sees_its_window_of_a_ring",),
    ),
    Mutant(
        "a query sees a place too few at the other end of a ring",
        old="ones[1, 2 * size - window :] = True",
        new="ones[1, 2 * size - window + 1 :] = True",
        tests=("test_a_query_sees_its_window_of_a_ring",),
    ),
    Mutant(
        "what a mask hides stays hidden when its slot is taken again",
        old="place = last - (last - slot) % self._size",
        new="place = slot.expand(len(what), -1)",
        tests=("test_a_query_sees_its_window_of_a_ring",),
    ),
    Mutant(
        "a step overwrites what its first query sees",
        old="-(-(window + LARGEST_STEP + TOKENS) // TOKENS) * TOKENS",
        new="-(-(window + LARGEST_STEP - TOKENS) // TOKENS) * TOKENS",
        tests=("test_slots_are_enough_and_few",),
    ),
    Mutant(
        "a beam writes to a block of a ring that another reads",
        old="self.table = torch.where(entered, own, self.table)",
        new="self.table = self.table.clone()",
        tests=("test_beams_go_round_the_ring",),
    ),
    Mutant(
        "a text comes round a ring to a block that another reads still",
        old="if bool((entered[self.table.long(), numbers] & ~entered).any()):",
        new="if bool((entered & ~entered).any()):",
        tests=("test_a_text_that_stays_behind_keeps_what_it_reads",),
    ),
    Mutant(
        "a ring is taken back to what beams have given up",
        old="self.oldest = max(self.oldest, seen + TOKENS - 1 - self.slots)",
        new="self.oldest = max(self.oldest, seen - self.slots)",
        tests=("test_beams_give_up_the_rest_of_a_block",),
    ),
    Mutant(
        "the default gives way to what is hardly faster",
        old="cost(0) <= cost(best) + math.log1p(question.schedule.close)",
        new="cost(0) <= cost(best)",
        tests=("test_the_default_stays_where_none_is_clearly_faster",),
    ),
    Mutant(
        "a cache whose tensors became others is read where they were",
        old="known[0] == changes and ",
        new="",
        tests=("test_a_cache_whose_tensors_are_others[_other_tensors]",),
    ),
    Mutant(
        "neighbours' memory goes into huge pages",
        old="2 * count >= size",
        new="count > 0",
        tests=("test_pages_that_blocks_mostly_cover",),
    ),
    Mutant(
        "what PyTorch writes to is the program's own",
        old="_become(step.regions, RegionKind.SHARED)",
        new="pass",
        tests=("test_a_program_does_what_its_graph_does",),
    ),
    Mutant(
        "a linear outside takes its activation with it",
        old="            self.emitter.ends = ends\n",
        new="",
        tests=("test_an_activation_is_kept_where_its_linear_is_not_in_the_program",),
    ),
    Mutant(
        "weights are moved without what they hold",
        old="new = room.empty(former.shape, former.dtype).copy_(former)",
        new="new = room.empty(former.shape, former.dtype)",
        tests=("test_they_lie_in_order_and_give_the_same",),
    ),
    Mutant(
        "models that share layers take their weights from each other",
        old="return 2 * sum(follow) < len(follow)",
        new="return not all(follow)",
        tests=("test_models_that_share_layers_do_not_take_them_from_each_other",),
    ),
    Mutant(
        "a linear that shares a weight keeps the former one",
        old="for linear in owners.pop(id(former)):",
        new="for linear in owners.pop(id(former))[:1]:",
        tests=("test_they_lie_in_order_and_give_the_same",),
    ),
)
