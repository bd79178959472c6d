"""Defects of the operators in Python: references, fake implementations, gradients."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPERATORS = (
    Mutant(
        "symmetric codes have a lowest one more",
        old="return (-qmax if symmetric else -qmax - 1), qmax",
        new="return -qmax - 1, qmax",
        tests=(
            "test_quantize_by_a_scale_equals_its_reference",
            "test_inlined_quantize_by_a_scale_is_quantize",
        ),
    ),
    Mutant(
        "the reference of a static scale keeps faulty rows",
        old="q, zero = torch.where(finite, q, 0), torch.where(finite, zero, 0)",
        new="zero = torch.where(finite, zero, 0)",
        tests=("test_quantize_by_a_scale_equals_its_reference",),
    ),
    Mutant(
        "a fake result has the type of its input",
        old="return x.new_empty(x.shape, dtype=out_dtype)\n\n\nno_gradient",
        new="return x.new_empty(x.shape)\n\n\nno_gradient",
        tests=("test_opcheck[fake_quantize]",),
    ),
    Mutant(
        "the gradient of rotate turns the same way",
        old="dx = ops.rotate(grad, factor, ctx.rotation, not ctx.back)",
        new="dx = ops.rotate(grad, factor, ctx.rotation, ctx.back)",
        tests=("test_gradients_of_rotate",),
    ),
    Mutant(
        "the gradient of a factor is a mean, not a sum",
        old="products.reshape(-1, products.shape[-1]).sum(0)",
        new="products.reshape(-1, products.shape[-1]).mean(0)",
        tests=("test_gradients_of_rotate",),
    ),
    Mutant(
        "the weight is multiplied by its factor",
        old="v = w.float() if factor is None else w.float() / factor",
        new="v = w.float() if factor is None else w.float() * factor",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "the gradient of a step has the wrong sign",
        old="d_step = d * (codes - torch.where(inside, scaled, 0.0))",
        new="d_step = d * (torch.where(inside, scaled, 0.0) - codes)",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "a gradient passes what was clipped",
        old="return d * inside, d_step.reshape",
        new="return d, d_step.reshape",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "both int8 products of the backward have the same random bits",
        old="zero_point, saved.seed + 1)",
        new="zero_point, saved.seed)",
        tests=("test_the_two_int8_products_round_apart",),
    ),
    Mutant(
        "the int8 gradient of a weight forgets zero points",
        old="return product[:, :-1] - product[:, -1:]",
        new="return product[:, :-1]",
        tests=("test_int8_backward_is_within_a_rounding_step",),
    ),
    Mutant(
        "the int8 backward quantizes the weight per row, whatever its axes",
        old="code = list(Code(ctx.w_bits, per_tensor=ctx.w_per_tensor))",
        new="code = list(Code(ctx.w_bits))",
        tests=("test_int8_backward_is_within_a_rounding_step",),
    ),
    Mutant(
        "the backward quantizes the weight per row, whatever its axes",
        old="axes = [0, 1] if ctx.w_per_tensor else [1]",
        new="axes = [1]",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "the gradient of a weight is multiplied by its factor",
        old="dw = dw if saved.factor is None else dw / saved.factor",
        new="dw = dw if saved.factor is None else dw * saved.factor",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "the gradient of a bias is that of one row",
        old="gradients[2] = g.sum(0).to(ctx.bias_dtype)",
        new="gradients[2] = g[0].to(ctx.bias_dtype)",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "the gradient of x stays in the rotated space",
        old="        dx = ops.rotate(dx, saved.factor, ctx.code.rotation, True)\n",
        new="        dx = dx.float()\n",
        tests=("test_gradients_equal_the_oracle[gradients]",),
    ),
    Mutant(
        "operators lose tangents without a word",
        old='            refuse_tangents(f"qfx::{name}", args)\n',
        new="            pass\n",
        tests=("test_tangents_are_an_error",),
    ),
    Mutant(
        "a second derivative is zero without a word",
        old="        if torch.is_grad_enabled():\n            raise NotImplementedError(",
        new="        if False:\n            raise NotImplementedError(",
        tests=("test_second_derivatives_are_an_error",),
    ),
    Mutant(
        "operands on two devices are taken",
        old="            if len(devices) > 1:\n",
        new="            if len(devices) > 2:\n",
        tests=("test_operands_on_another_device",),
    ),
    Mutant(
        "heads of keys are repeated in turn",
        old="k, v = (t.repeat_interleave(group, -3) for t in (k, v))",
        new="k, v = (t.repeat(group, 1, 1) for t in (k, v))",
        tests=("test_all_instruction_sets_layouts_and_heads_give_the_same_bits",),
    ),
    Mutant(
        "a fake result of appended keys has none of the past",
        old="rows = past.shape[-2] + added.shape[-2]",
        new="rows = added.shape[-2]",
        tests=("test_opcheck[attention_append]",),
    ),
    Mutant(
        "the mean of the keys is that of all of them",
        old="return torch.where(alike, k - total / row.sum(-2, keepdim=True), k)",
        new="return torch.where(alike, k - total / row.shape[-2], k)",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
)
