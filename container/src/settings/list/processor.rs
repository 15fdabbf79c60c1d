//! Variables of processors and memory.

use crate::settings::variable::{Variable, variables};

pub(super) const PROCESSOR: &[Variable] = variables! {
    /// How many processors the machine has; `half` and `max` are of those that the pod may use.
    done "CPU_CORES" = "2" (processor.cores): Processors;
    /// Sockets, cores and threads, as in QEMU; it goes over CPU_CORES.
    translated "SMP" = "" (processor.topology): Processors;
    /// The model of the processors; it is always the host's.
    translated "CPU_MODEL" = "" (processor.model);
    /// Features of the processors that are added or taken away, as in QEMU.
    translated "CPU_FLAGS" = "" (processor.flags);
    /// The guest is told that it is in a virtual machine.
    ignored "VM" = "Y" => "a guest always sees that it is in a virtual machine";
    /// The machine runs on KVM.
    refused "KVM" = "Y": NoKvm
        => "the machine runs on KVM alone: leave it out, and give the pod /dev/kvm";
    /// The guest may run virtual machines itself, as WSL 2 and Hyper-V do.
    ignored "VMX" = "N"
        => "nested virtualization is off: WSL 2 and Hyper-V do not run in the guest";
    /// The guest is offered what Hyper-V offers, which Windows is faster with.
    done "HV" = "Y" (processor.hyperv);
    /// The size of memory; `half` and `max` are of what is free in the pod and on its host.
    done "RAM_SIZE" = "4G" (memory.size): Memory;
    /// Memory that is not free is not taken: the machine gets less, and a line says so.
    done "RAM_CHECK" = "Y" (memory.check);
    /// Less memory than this is an error; else it depends on the version.
    done "RAM_MINIMUM" = "" (memory.minimum): Memory;
};
