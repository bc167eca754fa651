"""Loads one stage of a model, and checks what can be seen of it alone."""

from __future__ import annotations

from functools import partial

from entrenar_py.train.model import model, precision
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.stages import stage_model
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.stage_model import Stage
from entrenar_py.train.stages.stage_workload import StageWorkload


def load(prepared: Prepared, cut: Cut, number: int) -> StageWorkload:
    """Return the stage with this `number` as a workload; loads its part of the checkpoint.

    Raises UsageError for a checkpoint that can't be used, and a model that can't be cut.
    """
    own, settings = cut.stages[number], prepared.settings
    module = model.part(
        settings,
        prepared.pad_token,
        partial(stage_model.shorten, own=own),
        {spec.name for spec in cut.specs[number]},
        unties=number < len(cut.stages) - 1,
    )
    products = precision.of_products(settings)
    stage = Stage(module, own, products)
    if settings.task != "classify":  # a model that looks ahead does so in some stage
        model.require_blind(settings, stage_model.unlike_at_the_end(module, products))
    return StageWorkload(
        module,
        stage,
        prepared.train,
        pad_token=prepared.pad_token,
        class_weights=prepared.class_weights,
        products=products,
    )
