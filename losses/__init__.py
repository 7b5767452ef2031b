"""The loss functions, flat. Each file of this package stands alone: copy one out, and it works."""

# ruff: noqa: F401
from losses.advantages import (
    batch_std_advantages,
    gpg_advantages,
    group_advantages,
    group_index,
    maxrl_advantages,
    opo_advantages,
    remax_advantages,
    rloo_advantages,
)
from losses.advantages_dapo import keep_groups, overlong_penalty
from losses.advantages_gdpo import gdpo_advantages
from losses.advantages_noise import shrunk_advantages
from losses.advantages_passk import best_of_group_advantages, passk_advantages, pkpo_rewards
from losses.advantages_tokens import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    returns_to_go,
    whiten,
)
from losses.aipo import aipo_loss
from losses.cispo import cispo_loss
from losses.correction import (
    effective_sample_size,
    icepop_weight,
    importance_weight,
    mis_weight,
    normalise_weight,
    tis_weight,
)
from losses.correction_mask import divergence_mask, m2po_mask, off_policy_sequence_mask, ratio_mask, veto_mask
from losses.correction_prox import loglinear_prox
from losses.covariance import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov
from losses.cross_tokenizer import align_bytes, cross_tokenizer_advantage, span_logp, uld_divergence
from losses.distill import (
    distill_advantage,
    full_divergence,
    partition_divergence,
    sampled_divergence,
    topk_divergence,
)
from losses.distill_teachers import average_teachers, mix_sampled, mix_teachers, route_teachers
from losses.dppo import dppo_loss
from losses.dro import dro_loss
from losses.genrm import Judgement, normalise, parse
from losses.genrm_choice import arena, pairwise, yes_no
from losses.genrm_free import free
from losses.genrm_logprob import expected_score, label_ids, label_logps
from losses.genrm_prompt import neutralised, render
from losses.genrm_vote import Tally, Vote, both_orders, rubric, tally, vote
from losses.gmpo import gmpo_loss
from losses.grpo import grpo_loss
from losses.gspo import gspo_loss, gspo_token_loss
from losses.kl import adaptive_beta, full_kl, k1, k1_st, k2, k3, k3_st, k3_weighted, kl_reward
from losses.linear_logp import gather_head, linear_logp
from losses.linear_loss import linear_loss, separable
from losses.linear_row_loss import linear_row_loss
from losses.linear_rows import has_triton, rows_triton, scale_triton
from losses.logp import nucleus, token_logp
from losses.masks import completion_mask, drop_truncated
from losses.reduce import row_weight, token_weight
from losses.reinforce import reinforce_loss
from losses.sapo import sapo_loss
from losses.topr import topr_loss
from losses.vespo import vespo_loss
