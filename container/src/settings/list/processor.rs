//! Variables of processors and memory.

use crate::settings::variable::{Variable, variables};

pub(super) const PROCESSOR: &[Variable] = variables! {
    /// The number of processors: a number, or `half` or `max` of those that the container may use.
    full "CPU_CORES" = "2" (processor.cores): Processors;
    /// Sockets, cores and threads, as in QEMU. Takes precedence over CPU_CORES.
    translated "SMP" = "" (processor.topology): Processors;
    /// The processor model: `host`, or the features that every processor of the host's vendor and
    /// of the level `x86-64-v2`, `x86-64-v3` or `x86-64-v4` has. Suspended machines of a level
    /// continue on nodes with other processors. Other models of QEMU are taken as `host`.
    translated "CPU_MODEL" = "" (processor.model);
    /// Features to hide or show, as in QEMU: `kvm=off`, `-hypervisor`, `-hv-ipi` and others of
    /// Hyper-V, `hv_vendor_id=TEXT`, `+vmx`. Others are those of the host.
    translated "CPU_FLAGS" = "" (processor.flags);
    /// Shows the guest that it runs in a virtual machine. With N, Windows is slower: it does not
    /// look for the Hyper-V enlightenments.
    full "VM" = "Y" (processor.virtual_machine);
    /// Runs the machine on KVM. With N it does so, too, and logs that: emulation is not supported.
    full "KVM" = "Y" (processor.kvm);
    /// Nested virtualization, for WSL 2 and Hyper-V in the guest. Needs a host whose KVM offers it.
    full "VMX" = "N" (processor.nested);
    /// Enables the Hyper-V enlightenments, which make Windows faster. If this host's KVM has none,
    /// there are only clocks and crash reports, and the log says so.
    full "HV" = "Y" (processor.hyperv);
    /// The size of memory: a size, or `half` or `max` of the free memory of the container and its
    /// host.
    full "RAM_SIZE" = "4G" (memory.size): Memory;
    /// Reduces RAM_SIZE to the free memory if it is larger, and logs that.
    full "RAM_CHECK" = "Y" (memory.check);
    /// The minimum memory. Less is an error. The default depends on the version.
    full "RAM_MINIMUM" = "" (memory.minimum): Memory;
};
