//! KVM: what this host's KVM can do, the virtual machine and its processors. All ioctls are in this
//! folder.

mod device_memory;
mod fd;
mod ram_slots;
pub mod routes;
pub mod smm;
pub mod state;
pub mod vcpu;
pub mod vm;

use std::fs;
use std::io::ErrorKind;
use std::sync::OnceLock;

use kvm_bindings as kb;
use kvm_ioctls::Kvm;
use serde::Serialize;

pub use self::fd::{Runner, hyperv_cpuid};
use crate::status::{Failure, Status};

const DEVICE: &str = "/dev/kvm";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvmSupport {
    /// The processor runs guests itself (VMX or SVM, nested or not).
    Full,
    /// `/dev/kvm` opens, but the processor has neither VMX nor SVM: guest code in kernel mode is
    /// emulated.
    Paravirtual,
    /// No usable `/dev/kvm`.
    None,
}

impl KvmSupport {
    /// Examines the host once: the result does not change, and a jail hides the files.
    pub fn of_this_host() -> Self {
        static FOUND: OnceLock<KvmSupport> = OnceLock::new();
        *FOUND.get_or_init(|| {
            if open().is_err() {
                return Self::None;
            }
            let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let has = |flag| flags.split_ascii_whitespace().any(|word| word == flag);
            if has("vmx") || has("svm") { Self::Full } else { Self::Paravirtual }
        })
    }
}

/// Why an operating system cannot run on a paravirtual-only KVM, and what to do.
pub const PARAVIRTUAL: &str = "this host's KVM is paravirtual only (no VMX or SVM in \
    /proc/cpuinfo): it emulates kernel-mode code slowly and incompletely, so firmware and \
    operating systems do not run; use a host with hardware virtualization (or a VM host with \
    nested virtualization switched on), or run without --firmware and --kernel for the built-in \
    probe";

/// Errors have the status that the reference image uses.
pub fn open() -> anyhow::Result<Kvm> {
    let kvm = Kvm::new().map_err(|error| {
        let reason = match std::io::Error::from(error).kind() {
            ErrorKind::NotFound => format!(
                "{DEVICE} does not exist: load the module kvm_intel or kvm_amd, switch \
                 virtualization on in the firmware setup, or, in a container, pass the device \
                 (--device {DEVICE})"
            ),
            ErrorKind::PermissionDenied => format!(
                "{DEVICE} may not be opened by this user: join its group (usermod -aG kvm USER) \
                 or run as root"
            ),
            _ => format!("{DEVICE} cannot be opened: {error}"),
        };
        Failure::new(Status::NoKvm, reason)
    })?;
    let version = kvm.get_api_version();
    if version != 12 {
        let reason = match version {
            -1 => format!("{DEVICE} is not KVM"),
            _ => format!("{DEVICE} speaks version {version} of its API, not 12"),
        };
        return Err(Failure::new(Status::NoKvm, reason));
    }
    Ok(kvm)
}

pub struct Capability {
    pub name: &'static str,
    /// KVM's number for it.
    pub cap: u32,
    /// Whether a machine cannot be built without it.
    pub required: bool,
    pub purpose: &'static str,
}

impl Capability {
    pub fn is_there(&self, kvm: &Kvm) -> bool {
        has(kvm, self.cap)
    }
}

macro_rules! capabilities {
    ($($name:ident $cap:ident, $required:literal, $purpose:literal;)*) => {
        /// Ordered as in the output of `vmm doctor`.
        pub const CAPABILITIES: &[Capability] = &[$(Capability {
            name: stringify!($name), cap: kb::$cap, required: $required, purpose: $purpose,
        }),*];
    };
}

capabilities! {
    USER_MEMORY KVM_CAP_USER_MEMORY, true, "guest memory";
    IRQCHIP KVM_CAP_IRQCHIP, true, "interrupt controllers in the kernel";
    PIT2 KVM_CAP_PIT2, true, "the timer in the kernel";
    IRQFD KVM_CAP_IRQFD, true, "interrupts from any thread";
    IOEVENTFD KVM_CAP_IOEVENTFD, true, "doorbells without an exit";
    IRQ_ROUTING KVM_CAP_IRQ_ROUTING, true, "MSI and MSI-X";
    IMMEDIATE_EXIT KVM_CAP_IMMEDIATE_EXIT, true, "stopping processors at once";
    READONLY_MEM KVM_CAP_READONLY_MEM, true, "firmware in flash";
    USER_NMI KVM_CAP_USER_NMI, false, "NMI from the control socket";
    X2APIC_API KVM_CAP_X2APIC_API, false, "more than 255 processors";
    X86_USER_SPACE_MSR KVM_CAP_X86_USER_SPACE_MSR, false, "`--msr` (unknown registers)";
    X86_MSR_FILTER KVM_CAP_X86_MSR_FILTER, false, "`--hyperv own` (Hyper-V's clocks without KVM's)";
    HYPERV_CPUID KVM_CAP_HYPERV_CPUID, false, "Hyper-V enlightenments (they speed up Windows)";
    HYPERV_SYNIC2 KVM_CAP_HYPERV_SYNIC2, false, "Hyper-V timers (Windows uses slower ones without)";
    TSC_CONTROL KVM_CAP_TSC_CONTROL, false, "a chosen TSC frequency";
    X86_SMM KVM_CAP_X86_SMM, false, "`--smm`: Secure Boot that the guest cannot switch off";
    MULTI_ADDRESS_SPACE KVM_CAP_MULTI_ADDRESS_SPACE, false, "`--smm`: memory for it";
    X86_MSR_FILTER KVM_CAP_X86_MSR_FILTER, false, "`--smm`: registers that reach its memory";
}

fn has(kvm: &Kvm, cap: u32) -> bool {
    kvm.check_extension_raw(cap.into()) > 0
}

/// Whether KVM has Hyper-V's interface.
pub fn has_hyperv(kvm: &Kvm) -> bool {
    has(kvm, kb::KVM_CAP_HYPERV_CPUID) && !hyperv_cpuid(kvm).is_empty()
}

/// Whether KVM lets this process provide a part of Hyper-V's interface.
pub fn allows_own_hyperv(kvm: &Kvm) -> bool {
    has(kvm, kb::KVM_CAP_X86_USER_SPACE_MSR) && has(kvm, kb::KVM_CAP_X86_MSR_FILTER)
}

/// The error names the first required capability that KVM lacks.
pub fn check(kvm: &Kvm) -> anyhow::Result<()> {
    let missing = CAPABILITIES.iter().find(|it| it.required && !it.is_there(kvm));
    match missing {
        None => Ok(()),
        Some(it) => Err(Failure::new(
            Status::NoKvm,
            format!("this host's KVM lacks {} ({}): use a newer kernel", it.name, it.purpose),
        )),
    }
}
