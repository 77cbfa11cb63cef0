//! Cases that once failed, as code. They run first.

use crate::engines::Cut::*;
use crate::engines::Engine::*;
use crate::engines::Living::*;
use crate::model::Block::*;
use crate::model::Input::*;
use crate::model::Model;
use crate::model::Shape::*;
use crate::plain::Updates::*;
use crate::script::Number::*;
use crate::script::Op::*;
use crate::script::{Call, Case};

/// Custom list without recompute on three offloaded stages: graphs referred to weights that had been evicted.
fn offloaded_own_list() -> Case {
    Case {
        model: Model { input: Numbers, blocks: vec![One(Linear), One(Linear)] },
        engine: Pipeline {
            devices: 1,
            schedule: 3,
            stages_per_device: 3,
            recompute: 0,
            living: OnHost,
            replicas: 1,
            updates_in_backward: false,
            own_list: Some((0, 3)),
        },
        cut: Count(2),
        number: F64,
        updates: Sgd,
        strict: false,
        head: false,
        terms: vec![(crate::model::Over::Samples, 4)],
        script: vec![Call { op: Backward { samples: 4 }, fault: None, rank: 0 }],
    }
}

/// Exact BatchNorm of an offloaded stage: between its forward and its recompute, another stage had overwritten
/// its saved weights.
fn offloaded_exact_norm() -> Case {
    let exact = One(Norm(crate::model::Policy::Exact));
    Case {
        model: Model { input: Numbers, blocks: vec![One(Linear), exact, One(Linear), One(Linear)] },
        engine: Pipeline {
            devices: 1,
            schedule: 2,
            stages_per_device: 4,
            recompute: 0,
            living: OnHost,
            replicas: 1,
            updates_in_backward: false,
            own_list: None,
        },
        cut: Fixed(1),
        number: F64,
        updates: Sgd,
        strict: false,
        head: false,
        terms: vec![(crate::model::Over::Samples, 4)],
        script: vec![Call {
            op: Whole { samples: 1, leaf: false, in_two: false },
            fault: None,
            rank: 0,
        }],
    }
}

pub fn cases() -> Vec<(&'static str, Case)> {
    vec![
        ("an offloaded list of one's own", offloaded_own_list()),
        ("an offloaded exact norm", offloaded_exact_norm()),
    ]
}
