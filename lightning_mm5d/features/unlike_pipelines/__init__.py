"""Replicas with unlike pipelines and unlike speeds: `Modality.pipelines` and `Modality.speeds`."""
