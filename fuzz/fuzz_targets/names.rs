//! Short texts that a user types: actions, schedules, recompute modes, numbers of bytes.

#![no_main]

use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{Action, Recompute, Schedule};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(action) = text.parse::<Action>() {
        assert_eq!(action.to_string().parse(), Ok(action));
    }
    if let Ok(schedule) = text.parse::<Schedule>() {
        assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }
    let _ = text.parse::<Recompute>();
    if let Ok(bytes) = text.parse::<Bytes>() {
        let _ = bytes.to_string();
    }
});
