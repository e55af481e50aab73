"""Where the parameters of a model are in its files, by transformers' own mapping.

transformers keeps the experts of a layer as one parameter, such as `experts.gate_up_proj` of (experts, 2 x hidden,
inputs). Most files have a tensor for each expert and projection instead, others the whole parameter under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

# Of each dimension: an index, or the start and end of a range.
Region: TypeAlias = tuple[int | tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """The part of a parameter that a tensor of a file is.

    parameter: its name in the model
    region:    the part; the tensor lacks the dimensions that have an index
    swapped:   two dimensions of the part that are the other way around in the file
    """

    parameter: str
    region: Region
    swapped: tuple[int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the part of a tensor with the parameter's shape, as the file has it."""
        found = tensor[tuple(one if isinstance(one, int) else slice(*one) for one in self.region)]
        return found if self.swapped is None else found.transpose(*self.swapped)


@dataclass(frozen=True)
class _Piece:
    """Tensors of files that are one tensor by now: its shape, and the part of it that each is."""

    shape: tuple[int, ...]
    parts: dict[str, Region]


class Layout:
    """The parameters of a model and the tensors of its files.

    Args:
        model: its modules, without weights. One that is not of transformers has no layout.
        shapes: of the tensors in its files, by name.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers import PreTrainedModel

        self.places: dict[str, Place] = {}  # by the tensor's name
        self._tensors: dict[str, list[str]] = {}
        self.unknown: dict[str, str] = {}  # parameters whose files are converted in a way that is not followed here
        if isinstance(model, PreTrainedModel):
            self._add(_Names(model), shapes)
        for name, place in self.places.items():
            self._tensors.setdefault(place.parameter, []).append(name)

    def tensors(self, parameter: str) -> list[str]:
        """Names of the tensors of a parameter; empty if that is not known."""
        return self._tensors.get(parameter, [])

    def _add(self, names: _Names, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.core_model_loading import dot_natural_key

        found: dict[str, tuple[Any, dict[str, list[_Piece]]]] = {}
        for name in sorted(shapes, key=dot_natural_key):  # as transformers reads them, which numbers the experts
            parameter, pattern, converter = names.find(name)
            if parameter in names.state:
                whole: Region = tuple((0, size) for size in shapes[name])
                pieces = found.setdefault(parameter, (converter, {}))[1].setdefault(pattern, [])
                pieces.append(_Piece(shapes[name], {name: whole}))
        for parameter, (converter, pieces) in found.items():
            if converter is None:
                (piece,) = next(iter(pieces.values()))[:1]
                self.places |= {name: Place(parameter, region) for name, region in piece.parts.items()}
            else:
                self._convert(parameter, tuple(names.state[parameter].shape), converter, pieces)

    def _convert(self, parameter: str, shape: tuple[int, ...], converter: Any, pieces: dict[str, list[_Piece]]) -> None:
        """Follow a conversion of transformers to the regions of its tensors."""
        swapped = None
        groups = [pieces[pattern] for pattern in converter.source_patterns if pattern in pieces]
        kinds = [type(operation).__name__ for operation in converter.operations]
        for kind, operation in zip(kinds, converter.operations, strict=True):
            if kind == "MergeModulelist":
                groups = [[_stack(group, operation.dim)] for group in groups]
            elif kind == "Concatenate":
                groups = [[_concatenate([piece for group in groups for piece in group], operation.dim)]]
            elif kind == "Transpose" and len(kinds) == 1 and len(groups) == len(groups[0]) == 1:
                if not (operation.check_dims and groups[0][0].shape == shape):
                    swapped = operation.dim0, operation.dim1
            else:
                self.unknown[parameter] = kind
                return
        (piece,) = groups[0]
        for name, region in piece.parts.items():
            if swapped is not None:
                ranges = list(region)
                one, two = swapped
                ranges[one], ranges[two] = ranges[two], ranges[one]
                region = tuple(ranges)
            self.places[name] = Place(parameter, region, swapped)


class _Names:
    """transformers' mapping from the names in files to those of the model's parameters."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self.state: dict[str, torch.Tensor] = model.state_dict()
        self._prefix = model.base_model_prefix
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]

    def find(self, name: str) -> tuple[str, str, Any]:
        """The parameter, the pattern that the name matches (the name itself if none), and the conversion, or None."""
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)
        if found not in self.state and name in self.state:
            found, pattern = rename_source_key(name, [], [], self._prefix, self.state)
        converter = next((one for one in self._converters if pattern in one.source_patterns), None)
        return found, pattern or name, converter


def _stack(pieces: list[_Piece], dim: int) -> _Piece:
    shape = pieces[0].shape
    parts: dict[str, Region] = {}
    for number, piece in enumerate(pieces):
        parts |= {name: (*region[:dim], number, *region[dim:]) for name, region in piece.parts.items()}
    return _Piece((*shape[:dim], len(pieces), *shape[dim:]), parts)


def _concatenate(pieces: list[_Piece], dim: int) -> _Piece:
    start, shape = 0, pieces[0].shape
    parts: dict[str, Region] = {}
    for piece in pieces:
        for name, region in piece.parts.items():
            own = region[dim]
            assert isinstance(own, tuple)
            parts[name] = (*region[:dim], (own[0] + start, own[1] + start), *region[dim + 1 :])
        start += piece.shape[dim]
    return _Piece((*shape[:dim], start, *shape[dim + 1 :]), parts)
