"""Frozen feature extractors, applied once before training: wavelet scattering by name, or any module of your own."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.features.extraction import (
        FEATURES,
        Preprocessing,
        build,
        checksum,
        extract,
        of_data_set,
        output_shape,
        with_checksum,
    )
    from dpps.features.scattering import ColourScattering, Scattering, morlet, normalised_scattering
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
