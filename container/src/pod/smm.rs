//! The machine's firmware: with Secure Boot, one that runs in system management mode (SMM), where
//! the host's KVM has it.

use std::path::Path;
use std::process::Command;

use super::child;
use crate::firmware::{self, Firmware};
use crate::settings::Boot;

/// The capabilities in the report of `vmm doctor` that SMM needs.
const NEEDS: [&str; 3] = ["X86_SMM", "MULTI_ADDRESS_SPACE", "X86_MSR_FILTER"];

pub(super) fn firmware(boot: Boot) -> anyhow::Result<Firmware> {
    let found = firmware::find(boot, Path::new("/"), is_there)?;
    if boot.is_secure() && !found.smm {
        tracing::info!(
            "Secure Boot without system management mode, which this host's KVM or this image \
             lacks: a kernel in the guest could change the keys"
        );
    }
    Ok(found)
}

fn is_there() -> bool {
    let report = Command::new(child::program()).args(["doctor", "--json"]).env_clear().output();
    report.is_ok_and(|report| is_reported(&report.stdout))
}

fn is_reported(report: &[u8]) -> bool {
    let report: serde_json::Value = serde_json::from_slice(report).unwrap_or_default();
    let found = report["capabilities"].as_array().into_iter().flatten();
    let there = found.filter(|it| it["there"] == true).filter_map(|it| it["name"].as_str());
    let there: Vec<_> = there.collect();
    NEEDS.iter().all(|name| there.contains(name))
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn smm_needs_all_its_capabilities() {
        let report = |missing: &str| {
            let found = NEEDS.map(|name| json!({"name": name, "there": name != missing}));
            json!({ "capabilities": found }).to_string()
        };
        assert!(is_reported(report("IRQFD").as_bytes()));
        for other in NEEDS.map(report).into_iter().chain([String::new(), "[]".into()]) {
            assert!(!is_reported(other.as_bytes()), "{other}");
        }
    }
}
