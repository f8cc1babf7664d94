"""One stage on one rank: local and remote modules, placeholders, what is received and where the step stops."""

from lightning_mm5d.stage.deferred import Deferred, DeferredProducts
from lightning_mm5d.stage.patches import Patches, TorchEncoders
from lightning_mm5d.stage.payload import Payload
from lightning_mm5d.stage.remote import drop_parameters, is_placeholder
from lightning_mm5d.stage.run import Run
from lightning_mm5d.stage.runtime import Runtime
from lightning_mm5d.stage.view import GraphEndError, StageError, StageView, views
