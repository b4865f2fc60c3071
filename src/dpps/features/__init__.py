"""Frozen feature extractors, applied once before training: wavelet scattering by name, or any module of your own."""

from dpps.features.extraction import FEATURES, extract, of_data_set
from dpps.features.scattering import Scattering, normalised_scattering

__all__ = ["FEATURES", "Scattering", "extract", "normalised_scattering", "of_data_set"]
