//! A profile from a file, JSON or TOML: refused with an error, or planned.

#![no_main]

use brimful_plan::balance::Profile;
use brimful_plan::plan::{PlanDevice, Request, plan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let json = serde_json::from_str::<Profile>(text).ok();
    let Some(profile) = json.or_else(|| toml::from_str(text).ok()) else { return };
    let device = PlanDevice { memory: Some(1 << 30), ..PlanDevice::default() };
    let mut request = Request::new(&profile, vec![device; 2], 8);
    request.optimizer_bytes = 2.0;
    let _ = plan(&request);
});
