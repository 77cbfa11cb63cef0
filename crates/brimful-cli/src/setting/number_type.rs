//! Dtype of a model, and the arithmetic that goes with it.

use anyhow::Result;
use brimful::device;
use clap::ValueEnum;
use serde::Serialize;
use tch::{Device, Kind};

use crate::exit::ensure_use;

/// Precision of a model's parameters and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NumberType {
    F64,
    F32,
    /// f32, with matrix products in TF32 on CUDA
    Tf32,
    /// Parameters and activations in bf16
    Bf16,
}

impl NumberType {
    pub fn kind(self) -> Kind {
        match self {
            Self::F64 => Kind::Double,
            Self::F32 | Self::Tf32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
        }
    }

    /// Returns the dtype that holds weights stored in this one without loss.
    pub(crate) fn holding(kind: Kind) -> Self {
        match kind {
            Kind::Double => Self::F64,
            Kind::BFloat16 => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// Sets CUDA's arithmetic for this dtype, in the whole process.
    pub fn prepare(self, device: Device) -> Result<()> {
        ensure_use!(
            device != Device::Cpu || self != Self::Tf32,
            "--dtype tf32 is for CUDA devices: use --dtype f32 on the CPU"
        );
        Ok(device::allow_tf32(matches!(self, Self::Tf32 | Self::Bf16))?)
    }
}

super::shown_as_given!(NumberType);
