"""What a user may say about a layout: fields, checks and the error. Imports no torch, so that errors come at once."""

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import PipelineTemplate
from lightning_mm5d.config.modality import Modality
