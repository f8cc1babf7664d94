"""Replicas with unlike pipelines and unlike speeds: `Modality.pipeline.pipelines` and `Modality.pipeline.speeds`."""
