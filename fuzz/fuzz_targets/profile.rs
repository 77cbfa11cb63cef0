//! A profile from a file, JSON or TOML: refused with an error, or planned.

#![no_main]

use brimful::balance::Profile;
use brimful::plan::{Device, Request, plan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let json = serde_json::from_str::<Profile>(text).ok();
    let Some(profile) = json.or_else(|| toml::from_str(text).ok()) else { return };
    let device = Device { memory: Some(1 << 30), ..Device::default() };
    let mut request = Request::new(&profile, vec![device; 2], 8);
    request.optimizer_bytes = 2.0;
    let _ = plan(&request);
});
