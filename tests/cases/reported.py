"""The failures that people reported, by number, what they really were, and the tests that cover them.

`found` are words that those tests hold a verdict to: cause, phase, operator, module or node, as far as the
failure has them. A reported non-event has none: there the tests hold that nothing is said.
"""

from dataclasses import dataclass

_REAL = "diagnosis/test_real_failures.py::"
_MATH = "cases/test_model_math.py::"
_RANKS = "cases/test_many_ranks.py::"
_BUFFERS = "cases/test_poisoned_buffers.py::"
_CLIPPING = "cases/test_clipping_and_norms.py::"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One reported failure."""

    title: str
    tests: tuple[str, ...]
    """'folder/file.py::function', in the order: what it is, what is done about it."""
    found: tuple[str, ...] = ()


REPORTED = {
    1: Reported(
        title="the root of a distance of zero",
        tests=(
            _REAL + "test_distance_of_identical_embeddings",
            _MATH + "test_distance_of_identical_embeddings",
        ),
        found=("math", "backward", "aten.div.Tensor", "SqrtBackward0", "aten.mul.Tensor in PowBackward0"),
    ),
    2: Reported(
        title="the branch of where() that is not taken",
        tests=(
            _REAL + "test_branch_of_where_that_was_not_taken",
            _REAL + "test_branch_of_where_that_does_no_harm",
            _MATH + "test_unselected_branch_that_poisons_the_gradient",
            _MATH + "test_unselected_branch_that_does_no_harm",
        ),
        found=("math", "forward", "gate", "sqrt", "exp", "mask the input, not the output"),
    ),
    3: Reported(
        title="attention over a row that is masked as a whole",
        tests=(
            _REAL + "test_attention_over_an_empty_sequence",
            _MATH + "test_attention_over_an_empty_sequence",
        ),
        found=("data", "forward", "aten._softmax.default", "layers.0", "nothing but -inf"),
    ),
    5: Reported(
        title="no supervised token, on one rank",
        tests=(
            _REAL + "test_no_token_is_supervised",
            _RANKS + "test_a_rank_without_supervised_tokens_is_named_and_the_step_left_out_by_all",
        ),
        found=("data", "forward", "aten.div.Tensor", "0 / 0", "nonfinite_loss"),
    ),
    6: Reported(
        title="a norm that overflows, and clipping that spreads the one bad gradient",
        tests=(
            _CLIPPING + "test_huge_finite_gradient_is_clipped_by_its_true_norm",
            _CLIPPING + "test_culprit_is_named_before_clipping_spreads_it",
        ),
    ),
    7: Reported(
        title="a norm of finite float16 gradients",
        tests=(_CLIPPING + "test_extreme_but_finite_gradients_are_no_incident",),
    ),
    8: Reported(
        title="running statistics that a bad batch has poisoned",
        tests=(
            "cases/test_reported.py::test_running_statistics_beside_a_bad_record",
            _BUFFERS + "test_running_statistics_of_a_bad_batch",
        ),
        found=("data", "input", "running_mean"),
    ),
    10: Reported(
        title="a loss scaler that looks for its scale",
        tests=("cases/test_loss_scaling.py::test_search_for_a_scale_is_left_alone",),
    ),
    14: Reported(
        title="Adam's eps, which is 0 in float16",
        tests=(
            _REAL + "test_half_precision_adam_whose_eps_is_zero",
            "diagnosis/test_optimizers.py::test_eps_that_is_zero_in_half_precision",
            "cases/test_optimizer_arithmetic.py::test_epsilon_that_is_zero_in_the_parameters_dtype",
        ),
        found=("optimizer", "eps", "aten.addcdiv_.default", "aten._foreach_addcdiv_.ScalarList"),
    ),
    15: Reported(
        title="a sum of bfloat16 gradients that overflows, and Adam's moments",
        tests=(
            _REAL + "test_infinity_from_adding_up_gradients_in_bfloat16",
            "cases/test_optimizer_arithmetic.py::test_one_inf_gradient_never_reaches_the_moments",
            "cases/test_optimizer_arithmetic.py::test_accumulation_overflows_in_bfloat16",
        ),
        found=("precision", "reduce", "nonfinite_gradient"),
    ),
    16: Reported(
        title="every step is dropped, for ever",
        tests=(
            _REAL + "test_zero_initialised_gate_under_a_norm",
            "cases/test_persistent_failures.py::test_one_parameter_fails_on_every_step",
        ),
        found=("math", "backward", "aten.div.Tensor", "SqrtBackward0", "not transient", "gate"),
    ),
    20: Reported(
        title="activation checkpointing, and a weight that is used twice",
        tests=(_REAL + "test_fault_in_a_checkpointed_block",),
        found=("math", "backward", "aten.div.Tensor", "SqrtBackward0", "blk", "tied.weight"),
    ),
    23: Reported(
        title="attention scores beyond float16",
        tests=(_REAL + "test_half_precision_attention_scores_overflow",),
        found=("precision", "forward", "aten.bmm.default", "attn", "65504"),
    ),
    24: Reported(
        title="one bad record, and a run that comes back to it for ever",
        tests=(
            _REAL + "test_a_bad_record",
            "cases/test_bad_data.py::test_one_bad_record",
            "cases/test_bad_data.py::test_rollback_does_not_loop_on_the_same_record",
        ),
        found=("data", "input"),
    ),
    28: Reported(
        title="infinities that healthy code makes",
        tests=(
            _REAL + "test_infinities_that_healthy_code_makes",
            _REAL + "test_a_fault_beside_healthy_infinities_is_the_one_that_is_blamed",
        ),
    ),
    29: Reported(
        title="a device that saturates instead of making infinities",
        tests=("callbacks/test_saturation.py::test_outputs_that_saturate_are_found_in_the_first_step",),
        found=("precision", "forward", "fc1"),
    ),
    30: Reported(
        title="a flipped bit in one rank's gradient",
        tests=(
            _REAL + "test_flipped_bit_in_a_gradient",
            _RANKS + "test_a_flipped_exponent_bit_is_kept_from_the_weights_and_its_rank_named",
        ),
        found=("hardware", "element 5, bit 30", "rank_divergence"),
    ),
    32: Reported(
        title="ranks that decide each for itself",
        tests=(
            _RANKS + "test_ranks_that_would_skip_by_their_own_loss_decide_together",
            _RANKS + "test_a_step_skipped_by_one_rank_alone_is_found_at_the_next_check_and_healed",
        ),
        found=("nonfinite_loss", "rank_divergence"),
    ),
    33: Reported(
        title="rows of a gradient that nobody wrote",
        tests=(
            _REAL + "test_gradient_rows_nobody_wrote",
            _REAL + "test_uninitialised_memory_is_found_even_when_it_happens_to_be_finite",
        ),
        found=("operator", "backward", "VarlenBackward", "attn", "rows 6-7"),
    ),
    35: Reported(
        title="parameters of every kind, and no fault",
        tests=(
            "cases/test_parameter_zoo.py::test_anything_may_lie_frozen_in_a_model",
            "cases/test_parameter_zoo.py::test_animals_in_the_optimizer",
        ),
    ),
    36: Reported(
        title="a learning rate that ruined the run long before it shows",
        tests=(
            _REAL + "test_divergence_of_the_learning_rate",
            "cases/test_divergence.py::test_goes_further_back_than_the_ruined_snapshots",
        ),
        found=("optimizer", "forward", "aten.pow.Tensor_Scalar", "learning rate"),
    ),
}
