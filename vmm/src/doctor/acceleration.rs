//! Whether the processor delivers interrupts without exits (Intel's APICv, AMD's AVIC). KVM reports
//! this to no program, so the probe measures it: the end of an interrupt is a write to the local
//! APIC, which exits without this feature, and then costs about as much as CPUID, which always
//! exits.

use serde::Serialize;

use super::host::Host;

/// Costs of two exits in nanoseconds, as a machine measured them.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Costs {
    pub(super) eoi_ns: u64,
    pub(super) cpuid_ns: u64,
}

impl Costs {
    /// A write without an exit takes some tens of cycles, and an exit at least several hundred.
    fn is_without_exit(self) -> bool {
        self.eoi_ns.saturating_mul(3) < self.cpuid_ns
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Acceleration {
    /// Intel's or AMD's name of the feature.
    name: Option<&'static str>,
    /// Whether a machine used it: one without Hyper-V's interface, and one with it, as Windows has.
    active: Option<bool>,
    active_with_hyperv: Option<bool>,
    pub(super) says: String,
}

/// A way to accelerate: its name, module, parameter, and the processor's flags that it needs.
struct Kind {
    name: &'static str,
    module: &'static str,
    parameter: &'static str,
    flags: &'static [&'static str],
}

const KINDS: [Kind; 2] = [
    Kind { name: "AVIC", module: "kvm_amd", parameter: "avic", flags: &["avic"] },
    Kind {
        name: "APICv",
        module: "kvm_intel",
        parameter: "enable_apicv",
        flags: &["apicv", "vapic_reg", "vid", "posted_intr"],
    },
];

impl Acceleration {
    /// `plain` and `hyperv` are the costs in a machine without and with Hyper-V's interface.
    pub(super) fn of(host: &Host, plain: Option<Costs>, hyperv: Option<Costs>) -> Self {
        let kind = KINDS.iter().find(|kind| host.modules.contains_key(kind.module));
        let [active, active_with_hyperv] =
            [plain, hyperv].map(|costs| kind.and(costs).map(Costs::is_without_exit));
        let says = match kind {
            None => "neither kvm_amd nor kvm_intel is loaded: each interrupt exits".to_owned(),
            Some(kind) => match (active, active_with_hyperv) {
                (None, None) => format!("{}: not measured", kind.name),
                (Some(false) | None, Some(false) | None) => {
                    format!("{} is not active: {}", kind.name, kind.why_not(host))
                }
                (Some(true), Some(false)) => format!(
                    "{} is active, but not with Hyper-V's interface: KVM switches it off for that",
                    kind.name
                ),
                _ => format!("{} is active: interrupts need no exits", kind.name),
            },
        };
        Self { name: kind.map(|kind| kind.name), active, active_with_hyperv, says }
    }
}

impl Kind {
    /// The likely reason, if interrupts exit.
    fn why_not(&self, host: &Host) -> String {
        let Self { module, parameter, .. } = self;
        let value = host.modules.get(module).and_then(|all| all.get(*parameter));
        let has_flags = self.flags.iter().any(|flag| host.has_flag(flag));
        let below = host.has_flag("hypervisor");
        match value.map(String::as_str) {
            None => format!("{module} has no parameter {parameter}"),
            Some("N" | "0") if has_flags => format!(
                "{module} was loaded with {parameter}=0: load it with the option {parameter}=1"
            ),
            _ if !has_flags && below => {
                "the hypervisor below this host does not offer it to virtual machines".to_owned()
            }
            _ if !has_flags => "the processor does not have it".to_owned(),
            _ => format!(
                "{module} has {parameter} switched on, but KVM keeps it off for this machine; the \
                 trace point kvm:kvm_apicv_inhibit_changed says why"
            ),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const FAST: Option<Costs> = Some(Costs { eoi_ns: 30, cpuid_ns: 700 });
    const SLOW: Option<Costs> = Some(Costs { eoi_ns: 900, cpuid_ns: 700 });

    fn host(module: &'static str, parameter: (&str, &str), flags: &str) -> Host {
        let mut host = Host::examine();
        host.set_flags(flags);
        let (name, value) = parameter;
        host.modules = [(module, [(name.into(), value.into())].into())].into();
        host
    }

    #[test]
    fn a_cheap_end_of_interrupt_shows_that_it_is_active() {
        let host = host("kvm_intel", ("enable_apicv", "Y"), "apicv vid");
        let found = Acceleration::of(&host, FAST, FAST);
        assert_eq!((found.active, found.active_with_hyperv), (Some(true), Some(true)));
        assert_eq!(found.says, "APICv is active: interrupts need no exits");
        let found = Acceleration::of(&host, FAST, SLOW);
        assert!(found.says.contains("but not with Hyper-V"), "{}", found.says);
    }

    #[test]
    fn each_reason_has_its_sentence() {
        for (parameter, flags, costs, says) in [
            (("avic", "N"), "avic", SLOW, "kvm_amd was loaded with avic=0: load it"),
            (("avic", "N"), "", SLOW, "the processor does not have it"),
            (("avic", "Y"), "hypervisor", SLOW, "the hypervisor below this host"),
            (("other", "Y"), "avic", SLOW, "kvm_amd has no parameter avic"),
            (("avic", "Y"), "avic", SLOW, "kvm_apicv_inhibit_changed"),
            (("avic", "Y"), "avic", None, "AVIC: not measured"),
        ] {
            let found = Acceleration::of(&host("kvm_amd", parameter, flags), costs, None);
            assert!(found.says.contains(says), "{}", found.says);
        }
        let found = Acceleration::of(&host("kvm_pvm", ("force", "N"), ""), SLOW, None);
        assert_eq!((found.name, found.active), (None, None));
        assert!(found.says.starts_with("neither kvm_amd nor kvm_intel"), "{}", found.says);
    }
}
