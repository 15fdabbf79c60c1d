//! The ioctls and shared pages for which `kvm-ioctls` has no safe interface.
#![expect(unsafe_code, reason = "KVM's memory slots and run pages are raw pointers by nature")]

use std::cell::Cell;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, Once};

use anyhow::Context;
use host::ram::MmapRegion;
use kvm_bindings::{
    CpuId, kvm_cpuid_entry2, kvm_cpuid2, kvm_device_attr, kvm_reinject_control,
    kvm_userspace_memory_region, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::fam::FamStruct as _;
use vmm_sys_util::ioctl::{ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iow_nr, ioctl_iowr_nr};

#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) number: u32,
    pub(super) flags: u32,
    pub(super) guest: u64,
}

/// Maps host memory into the guest, or removes the mapping if `host` is `None`.
pub(super) fn set_slot(vm: &VmFd, slot: Slot, host: Option<&MmapRegion>) -> anyhow::Result<()> {
    let region = kvm_userspace_memory_region {
        slot: slot.number,
        flags: slot.flags,
        guest_phys_addr: slot.guest,
        memory_size: host.map_or(0, |host| host.size() as u64),
        userspace_addr: host.map_or(0, |host| host.as_ptr() as u64),
    };
    // SAFETY: the region is a live mapping of that size, and its owner keeps it until the VM
    // is gone or the slot is taken back (`lent::DeviceMemory` and `vm::Vm::ram` own both).
    unsafe { vm.set_user_memory_region(region) }
        .with_context(|| format!("memory slot {} at {:#x}", slot.number, slot.guest))
}

ioctl_iowr_nr!(KVM_GET_SUPPORTED_HV_CPUID, kvm_bindings::KVMIO, 0xc1, kvm_cpuid2);

/// The Hyper-V CPUID leaves that KVM supports. Empty if KVM was built without them.
pub fn hyperv_cpuid(kvm: &Kvm) -> Vec<kvm_cpuid_entry2> {
    let Ok(mut cpuid) = CpuId::new(kvm_bindings::KVM_MAX_CPUID_ENTRIES) else { return Vec::new() };
    // SAFETY: the pointer is to a header and the number of entries that it states.
    let result = unsafe {
        ioctl_with_mut_ptr(kvm, KVM_GET_SUPPORTED_HV_CPUID(), cpuid.as_mut_fam_struct_ptr())
    };
    if result < 0 {
        return Vec::new();
    }
    let count = cpuid.as_fam_struct_ref().len();
    cpuid.as_slice().get(..count).unwrap_or_default().to_vec()
}

ioctl_io_nr!(KVM_REINJECT_CONTROL, kvm_bindings::KVMIO, 0x71);

/// Makes the interval timer (PIT) drop ticks that a guest missed, instead of delivering them late.
pub(super) fn discard_lost_ticks(vm: &VmFd) -> anyhow::Result<()> {
    let control = kvm_reinject_control::default();
    // SAFETY: the ioctl reads one structure through a pointer that outlives the call.
    let done = unsafe { ioctl_with_ref(vm, KVM_REINJECT_CONTROL(), &control) };
    anyhow::ensure!(done == 0, "KVM_REINJECT_CONTROL: {}", std::io::Error::last_os_error());
    Ok(())
}

ioctl_iow_nr!(KVM_X86_SETUP_MCE, kvm_bindings::KVMIO, 0x9c, u64);
ioctl_ior_nr!(KVM_X86_GET_MCE_CAP_SUPPORTED, kvm_bindings::KVMIO, 0x9d, u64);

/// Gives a processor the machine-check banks of a PC, with the features that KVM supports: control
/// register, corrected-error interrupts (without them, Windows faults when it accesses their entry
/// of the local APIC), software recovery.
pub(super) fn set_up_machine_checks(kvm: &Kvm, vcpu: &VcpuFd) {
    const BANKS: u64 = 10;
    const WANTED: u64 = 1 << 8 | 1 << 10 | 1 << 24;
    let mut supported = 0_u64;
    // SAFETY: the ioctl writes one u64 through a pointer that outlives the call.
    let known = unsafe { ioctl_with_mut_ref(kvm, KVM_X86_GET_MCE_CAP_SUPPORTED(), &mut supported) };
    if known < 0 {
        return;
    }
    let capability = supported & WANTED | BANKS;
    // SAFETY: the ioctl reads one u64 through a pointer that outlives the call.
    let done = unsafe { ioctl_with_ref(vcpu, KVM_X86_SETUP_MCE(), &capability) };
    if done < 0 {
        tracing::debug!("KVM refuses machine checks with capability {capability:#x}");
    }
}

ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, kvm_bindings::KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, kvm_bindings::KVMIO, 0xe2, kvm_device_attr);

/// The attribute of a processor with the offset of its time stamp counter from the host's, at this
/// address.
fn tsc_attribute(address: u64) -> kvm_device_attr {
    kvm_device_attr {
        group: kvm_bindings::KVM_VCPU_TSC_CTRL,
        attr: kvm_bindings::KVM_VCPU_TSC_OFFSET.into(),
        addr: address,
        flags: 0,
    }
}

/// Linux before 5.16 does not tell the offset.
pub(super) fn tsc_offset(vcpu: &VcpuFd) -> Option<u64> {
    let mut offset = 0_u64;
    let attribute = tsc_attribute(&raw mut offset as u64);
    // SAFETY: the ioctl writes one u64 to the address in the attribute, which outlives the call.
    let known = unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) };
    (known == 0).then_some(offset)
}

/// Returns whether KVM took the offset.
pub(super) fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> bool {
    let attribute = tsc_attribute(&raw const offset as u64);
    // SAFETY: the ioctl reads one u64 from the address in the attribute, which outlives the call.
    let done = unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) };
    done == 0
}

/// Sets the offset of the guest's time stamp counter to the value that it has. After a triple fault
/// on AMD, Linux 6.1 runs the processor with the host's counter, although it knows the offset.
pub(super) fn renew_tsc_offset(vcpu: &VcpuFd) {
    if let Some(offset) = tsc_offset(vcpu) {
        let done = set_tsc_offset(vcpu, offset);
        tracing::trace!("the offset {offset:#x} of the time stamp counter is set again: {done}");
    }
}

/// Sets the registers that XSAVE has. Those of AMX, which need more room, are in no guest: this
/// process never requests them.
pub(super) fn set_xsave(vcpu: &VcpuFd, state: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: KVM reads more than this structure only of a guest that may have AMX.
    unsafe { vcpu.set_xsave(state) }
}

/// The data of a port access, and the width of one access in bytes: a string instruction is one
/// exit with many accesses.
pub(super) fn port_data(vcpu: &mut VcpuFd) -> (usize, &mut [u8]) {
    let run = vcpu.get_kvm_run();
    // SAFETY: called after KVM_EXIT_IO, for which KVM fills this member; any bytes are valid.
    let io = unsafe { run.__bindgen_anon_1.io };
    let start = ptr::from_mut(run).cast::<u8>();
    let offset = usize::try_from(io.data_offset).expect("the run area fits memory");
    // SAFETY: the offset is within the run area, which is mapped as long as the processor exists.
    let data = unsafe { start.add(offset) };
    let width = usize::from(io.size);
    let length = width * usize::try_from(io.count).expect("the run area fits memory");
    // SAFETY: KVM put this many bytes there; the slice borrows `vcpu` exclusively.
    (width, unsafe { std::slice::from_raw_parts_mut(data, length) })
}

/// An access to memory that the devices handle.
pub(super) struct MemoryAccess<'a> {
    pub(super) address: u64,
    pub(super) data: &'a mut [u8],
    /// Whether the processor is in system-management mode.
    pub(super) in_smm: bool,
}

pub(super) fn memory_access(vcpu: &mut VcpuFd) -> MemoryAccess<'_> {
    let run = vcpu.get_kvm_run();
    let in_smm = u32::from(run.flags) & kvm_bindings::KVM_RUN_X86_SMM != 0;
    // SAFETY: called after KVM_EXIT_MMIO, for which KVM fills this member; any bytes are valid.
    let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
    let length = mmio.data.len().min(mmio.len as usize);
    MemoryAccess { address: mmio.phys_addr, data: &mut mmio.data[..length], in_smm }
}

/// Answers an access to an MSR: with the value that was read, or with a fault.
pub(super) fn answer_register(vcpu: &mut VcpuFd, value: Option<u64>) {
    let run = vcpu.get_kvm_run();
    // SAFETY: called after KVM_EXIT_X86_RDMSR or _WRMSR, for which KVM fills this; any bytes are
    // valid.
    let msr = unsafe { &mut run.__bindgen_anon_1.msr };
    msr.error = u8::from(value.is_none());
    msr.data = value.unwrap_or(msr.data);
}

/// The suberror and the instruction bytes of KVM_EXIT_INTERNAL_ERROR.
pub(super) fn internal_error(vcpu: &mut VcpuFd) -> (u32, Vec<u8>) {
    let run = vcpu.get_kvm_run();
    // SAFETY: called after KVM_EXIT_INTERNAL_ERROR, for which KVM fills this; any bytes are valid.
    let error = unsafe { run.__bindgen_anon_1.internal };
    // struct kvm_run.emulation_failure: ndata, flags (bit 0: bytes are present), size, 15 bytes.
    let has_bytes = error.suberror == 1 && error.ndata >= 3 && error.data[0] & 1 == 1;
    let mut bytes = Vec::new();
    if has_bytes {
        let raw: Vec<u8> = error.data[1..3].iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes = raw[1..=usize::from(raw[0]).min(15)].to_vec();
    }
    (error.suberror, bytes)
}

/// Fails a hypercall that this machine does not implement: HV_STATUS_INVALID_HYPERCALL_CODE.
pub(super) fn refuse_hypercall(vcpu: &mut VcpuFd) {
    const KVM_EXIT_HYPERV_HCALL: u32 = 2;
    const INVALID_CODE: u64 = 2;
    let run = vcpu.get_kvm_run();
    // SAFETY: called after KVM_EXIT_HYPERV, for which KVM fills this member; any bytes are valid.
    let kind = unsafe { run.__bindgen_anon_1.hyperv.type_ };
    if kind == KVM_EXIT_HYPERV_HCALL {
        run.__bindgen_anon_1.hyperv.u.hcall.result = INVALID_CODE;
    }
}

thread_local! {
    /// The `immediate_exit` byte of the processor that this thread runs.
    static EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

static HANDLER: Once = Once::new();

/// The signal that interrupts KVM_RUN.
pub(super) fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    EXIT.with(|exit| {
        let exit = exit.get();
        if !exit.is_null() {
            // SAFETY: the byte lies in the run page of the processor whose thread this is, which
            // `Kickable` keeps alive; a signal handler runs on that same thread.
            unsafe { exit.write_volatile(1) };
        }
    });
}

/// Installs the handler of the kick signal, which would otherwise end the process.
fn catch_kicks() {
    HANDLER.call_once(|| {
        register_signal_handler(kick_signal(), on_kick).expect("real-time signals are free");
    });
}

/// The thread that runs a processor now, if one does.
#[derive(Default)]
pub struct Runner(Mutex<Option<libc::pthread_t>>);

impl Runner {
    fn lock(&self) -> MutexGuard<'_, Option<libc::pthread_t>> {
        self.0.lock().expect("a panic ends the process")
    }

    /// Whether the calling thread runs the processor.
    pub(super) fn is_here(&self) -> bool {
        *self.lock() == Some(this_thread())
    }

    /// Makes the processor leave KVM_RUN, or return from it at once if it enters it now.
    pub fn kick(&self) {
        if let Some(thread) = *self.lock() {
            // SAFETY: the thread has not ended: before that, it drops its `Kickable`, which waits
            // for this lock.
            unsafe { libc::pthread_kill(thread, kick_signal()) };
        }
    }
}

fn this_thread() -> libc::pthread_t {
    // SAFETY: it has no preconditions.
    unsafe { libc::pthread_self() }
}

/// While this value exists, this thread runs a processor, and the kick signal makes it leave
/// KVM_RUN.
pub(super) struct Kickable(Arc<Runner>);

impl Kickable {
    pub(super) fn new(vcpu: &mut VcpuFd, runner: Arc<Runner>) -> Self {
        catch_kicks();
        EXIT.set(&raw mut vcpu.get_kvm_run().immediate_exit);
        *runner.lock() = Some(this_thread());
        Self(runner)
    }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        *self.0.lock() = None;
        EXIT.set(ptr::null_mut());
    }
}
