//! One processor: its power-on state, running it until the next exit, and its registers for error
//! messages.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::sync::Arc;

use anyhow::Context;
use devices::bus::Spaces;
use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::{
    CpuId, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_debugregs, kvm_enable_cap,
    kvm_fpu, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs,
};
use kvm_ioctls::{Cap, Kvm, ReadMsrExit, VcpuExit, VcpuFd, WriteMsrExit};

use super::fd::{self, MemoryAccess};
use super::smm::{self, Smm};
use super::vm::Vm;
use crate::cpuid;
use crate::hyperv::{Provider, Written, is_register};
use crate::msr::Registers;

/// Registers that a reset keeps: the time stamp counter, and IA32_TSC_ADJUST, which shifts it.
const TSC: [u32; 2] = [0x10, 0x3b];
/// IA32_MISC_ENABLE: fast strings, as firmware sets it.
const MISC_ENABLE: (u32, u64) = (0x1a0, 1);
/// IA32_FEATURE_CONTROL: locked, as firmware sets it, with VMX if the guest has it. A processor
/// without this register ignores the write.
const FEATURE_CONTROL: u32 = 0x3a;
const LOCKED: u64 = 1;
const WITH_VMX: u64 = 1 << 2;
/// HV_X64_MSR_SCONTROL: the synthetic interrupt controller is enabled at power-on. KVM does not do
/// this itself.
const SCONTROL: (u32, u64) = (0x4000_0080, 1);

/// HV_X64_MSR_CRASH_CTL: the guest may report a crash (CrashNotify). KVM does not say so itself.
const CRASH_CTL: (u32, u64) = (0x4000_0105, 1 << 63);

/// HV_X64_MSR_HYPERCALL.
const HYPERCALL: u32 = 0x4000_0001;

/// MSRs that KVM saves but does not list: MTRRs, and the pages, sources and timers of Hyper-V's
/// synthetic interrupt controller. Without resetting them, a timer of the previous guest would
/// write into the memory of the new one.
const UNLISTED: &[RangeInclusive<u32>] = &[
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x2ff..=0x2ff,
    0x4000_0082..=0x4000_0083,
    0x4000_0090..=0x4000_009f,
    0x4000_00b0..=0x4000_00b7,
];
/// KVM_SYSTEM_EVENT_CRASH, and the MSRs in which Hyper-V guests report the reason.
const CRASH: u32 = 3;
const CRASH_PARAMETERS: RangeInclusive<u32> = 0x4000_0100..=0x4000_0104;

pub struct Vcpu {
    fd: VcpuFd,
    id: ProcessorId,
    power_on: PowerOn,
    /// `None` in a machine without system-management mode.
    smm: Option<Arc<Smm>>,
}

/// The state that a reset restores.
struct PowerOn {
    regs: kvm_regs,
    sregs: kvm_sregs,
    fpu: kvm_fpu,
    xcrs: Option<kvm_xcrs>,
    msrs: Vec<kvm_msr_entry>,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    debug: kvm_debugregs,
    /// Only with nested virtualization.
    nested: Option<Box<KvmNestedStateBuffer>>,
}

#[derive(Debug)]
pub enum Exit {
    /// An access, which the device has answered.
    Done,
    /// A signal arrived: this processor may have to stop.
    Interrupted,
    Shutdown,
    /// KVM_EXIT_SYSTEM_EVENT: its type and its data.
    System(u32, Vec<u64>),
    /// KVM cannot run the guest: a message with registers and instruction bytes.
    Broken(String),
}

#[derive(Clone, Copy, Debug)]
pub struct ProcessorId {
    /// Counted from 0. Processor 0 boots.
    pub index: usize,
    pub apic_id: u32,
}

impl Vcpu {
    pub fn new(
        kvm: &Kvm,
        vm: &Vm,
        id: ProcessorId,
        cpuid: &CpuId,
        hyperv: Option<Provider>,
    ) -> anyhow::Result<Self> {
        let fd = vm.fd.create_vcpu(u64::from(id.apic_id)).context("a processor")?;
        fd.set_cpuid2(cpuid).context("the features of a processor")?;
        if hyperv == Some(Provider::Kvm) {
            if vm.fd.check_extension(Cap::HypervSynic2) {
                let synic = kvm_enable_cap { cap: Cap::HypervSynic2 as u32, ..Default::default() };
                fd.enable_cap(&synic).context("Hyper-V's interrupt controller")?;
                set_msr(&fd, SCONTROL.0, SCONTROL.1);
            }
            set_msr(&fd, CRASH_CTL.0, CRASH_CTL.1);
        }
        fd::set_up_machine_checks(kvm, &fd);
        set_msr(&fd, MISC_ENABLE.0, MISC_ENABLE.1);
        let nested = cpuid::is_nested(cpuid.as_slice());
        set_msr(&fd, FEATURE_CONTROL, if nested { LOCKED | WITH_VMX } else { LOCKED });
        let mut power_on = PowerOn::of(kvm, &fd)?;
        if nested {
            let mut state = Box::<KvmNestedStateBuffer>::default();
            fd.nested_state(&mut state).context("nested virtualization")?;
            power_on.nested = Some(state);
        }
        let vcpu = Self { fd, id, power_on, smm: vm.smm.clone() };
        vcpu.set_mp_state()?;
        Ok(vcpu)
    }

    /// Lets the first processor run. The others wait until it starts them.
    fn set_mp_state(&self) -> anyhow::Result<()> {
        let mp_state =
            if self.id.index == 0 { KVM_MP_STATE_RUNNABLE } else { KVM_MP_STATE_UNINITIALIZED };
        self.fd.set_mp_state(kvm_mp_state { mp_state }).context("the state of a processor")
    }

    pub fn reset(&self) -> anyhow::Result<()> {
        let PowerOn { regs, sregs, fpu, xcrs, msrs, lapic, events, debug, nested } = &self.power_on;
        // KVM now takes note of an SMI that the processor has not taken. Otherwise it would take it
        // after the reset, with a handler of the previous system.
        self.fd.get_vcpu_events().context("pending events")?;
        // A processor that runs a guest of the guest leaves it. Otherwise the registers would
        // become those of that guest.
        if let Some(nested) = nested {
            self.fd.set_nested_state(nested).context("nested virtualization")?;
        }
        self.fd.set_regs(regs).context("registers")?;
        self.fd.set_fpu(fpu).context("floating-point registers")?;
        if let Some(xcrs) = xcrs {
            self.fd.set_xcrs(xcrs).context("extended control registers")?;
        }
        self.fd.set_sregs(sregs).context("system registers")?;
        set_msrs(&self.fd, msrs)?;
        fd::renew_tsc_offset(&self.fd);
        self.set_mp_state()?;
        self.fd.set_lapic(lapic).context("the local interrupt controller")?;
        self.fd.set_vcpu_events(events).context("pending events")?;
        self.fd.set_debug_regs(debug).context("debug registers")
    }

    /// Sets the state that a kernel's boot protocol requires, to start it without firmware.
    pub fn enter(
        &self,
        set_registers: impl FnOnce(&mut kvm_regs, &mut kvm_sregs),
        msrs: &[(u32, u64)],
    ) -> anyhow::Result<()> {
        let mut regs = self.power_on.regs;
        let mut sregs = self.power_on.sregs;
        set_registers(&mut regs, &mut sregs);
        self.fd.set_sregs(&sregs).context("system registers")?;
        self.fd.set_regs(&regs).context("registers")?;
        for (index, value) in msrs {
            set_msr(&self.fd, *index, *value);
        }
        Ok(())
    }

    /// Lets the kick signal stop this processor while it runs on this thread.
    pub fn kickable(&mut self) -> impl Drop + use<> {
        smm::set_processor(self.id.apic_id);
        fd::Kickable::new(&mut self.fd)
    }

    /// Tells the guest's clock that the guest was paused. Ignores the error of guests that do not
    /// use KVM's clock.
    pub fn wake_clock(&self) {
        self.fd.kvmclock_ctrl().ok();
    }

    pub fn nmi(&self) -> anyhow::Result<()> {
        self.fd.nmi().context("a non-maskable interrupt")
    }

    /// Runs the guest until the next exit. If the exit is an access, performs it.
    pub fn step(&mut self, spaces: &Spaces, registers: &Registers) -> Exit {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, _)) => {
                let (width, data) = fd::port_data(&mut self.fd);
                data.chunks_mut(width).for_each(|data| spaces.port.read(port.into(), data));
            }
            Ok(VcpuExit::IoOut(port, _)) => {
                let (width, data) = fd::port_data(&mut self.fd);
                data.chunks(width).for_each(|data| spaces.port.write(port.into(), data));
            }
            Ok(VcpuExit::MmioRead(..)) => {
                let MemoryAccess { address, data, in_smm } = fd::memory_access(&mut self.fd);
                spaces.memory_of(in_smm, address, data.len()).read(address, data);
            }
            Ok(VcpuExit::MmioWrite(..)) => {
                let MemoryAccess { address, data, in_smm } = fd::memory_access(&mut self.fd);
                spaces.memory_of(in_smm, address, data.len()).write(address, data);
            }
            Ok(VcpuExit::X86Rdmsr(ReadMsrExit { index, .. })) => {
                let value = self.read_register(index, registers);
                fd::answer_register(&mut self.fd, value);
            }
            Ok(VcpuExit::X86Wrmsr(WriteMsrExit { index, data, .. })) => {
                return self.write_register(index, data, registers);
            }
            Ok(VcpuExit::Hyperv) => fd::refuse_hypercall(&mut self.fd),
            // The processor halts in the kernel, so this is a spurious wake-up.
            Ok(VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => {}
            Ok(VcpuExit::Intr) => return self.interrupted(),
            Ok(VcpuExit::Shutdown) => return Exit::Shutdown,
            Ok(VcpuExit::SystemEvent(CRASH, _)) => return Exit::System(CRASH, self.crash_codes()),
            Ok(VcpuExit::SystemEvent(kind, data)) => return Exit::System(kind, data.to_vec()),
            Ok(VcpuExit::InternalError) => return self.internal_error(),
            Ok(VcpuExit::FailEntry(reason, _)) => {
                return self.broken(&format!("the processor refuses the guest: {reason:#x}"));
            }
            Ok(other) => {
                let what = format!("KVM stopped with {other:?}, which this machine does not use");
                return self.broken(&what);
            }
            Err(error) if error.errno() == libc::EINTR => return self.interrupted(),
            Err(error) if error.errno() == libc::EAGAIN => {}
            Err(error) => return self.broken(&format!("KVM cannot run the guest: {error}")),
        }
        Exit::Done
    }

    /// `None`: a fault.
    fn read_register(&self, index: u32, registers: &Registers) -> Option<u64> {
        match &registers.hyperv {
            Some(hyperv) if is_register(index) => {
                hyperv.read(index, self.id.index as u64, || self.tsc().unwrap_or(0))
            }
            _ => registers.policy.read(index),
        }
    }

    fn write_register(&mut self, index: u32, data: u64, registers: &Registers) -> Exit {
        let written = match &registers.hyperv {
            Some(hyperv) if is_register(index) => hyperv.write(index, data),
            _ if self.smm.is_some() && smm::FILTERED.contains(&index) => {
                if self.write_filtered(index, data) { Written::Done } else { Written::Fault }
            }
            _ if registers.policy.write(index, data) => Written::Done,
            _ => Written::Fault,
        };
        let accepted = if matches!(written, Written::Fault) { None } else { Some(data) };
        fd::answer_register(&mut self.fd, accepted);
        match written {
            Written::Crash(codes) => Exit::System(CRASH, codes.to_vec()),
            Written::Done | Written::Fault => Exit::Done,
        }
    }

    /// Writes a register through which KVM reaches memory. Returns false for a fault.
    fn write_filtered(&self, index: u32, value: u64) -> bool {
        let Some(smm) = &self.smm else { return false };
        let old = get_msr(&self.fd, index).unwrap_or(0);
        smm.allows(index, old, value) && set_msr(&self.fd, index, value)
    }

    /// The rate of the time stamp counter.
    pub fn tsc_hertz(&self) -> anyhow::Result<u64> {
        let khz = self.fd.get_tsc_khz().context("the rate of the time stamp counter")?;
        Ok(u64::from(khz) * 1000)
    }

    /// The time stamp counter as the guest reads it.
    pub fn tsc(&self) -> anyhow::Result<u64> {
        let entry = kvm_msr_entry { index: TSC[0], ..Default::default() };
        let mut msrs = Msrs::from_entries(&[entry]).context("a list of MSRs")?;
        let count = self.fd.get_msrs(&mut msrs).context("the time stamp counter")?;
        anyhow::ensure!(count == 1, "KVM does not tell the time stamp counter");
        Ok(msrs.as_slice()[0].data)
    }

    fn interrupted(&mut self) -> Exit {
        self.fd.set_kvm_immediate_exit(0);
        Exit::Interrupted
    }

    /// The reason that a Hyper-V guest reports for its crash: the bug check code and four
    /// parameters.
    fn crash_codes(&self) -> Vec<u64> {
        let wanted = CRASH_PARAMETERS.map(|index| kvm_msr_entry { index, ..Default::default() });
        let Ok(mut msrs) = Msrs::from_entries(&wanted.collect::<Vec<_>>()) else {
            return Vec::new();
        };
        let count = self.fd.get_msrs(&mut msrs).unwrap_or(0);
        msrs.as_slice()[..count].iter().map(|msr| msr.data).collect()
    }

    /// Completes the access of the last exit without running further guest code. The registers are
    /// valid only after this. An access across two pages is two exits.
    pub fn settle(&mut self, spaces: &Spaces, registers: &Registers) {
        self.fd.set_kvm_immediate_exit(1);
        while matches!(self.step(spaces, registers), Exit::Done) {
            self.fd.set_kvm_immediate_exit(1);
        }
        self.fd.set_kvm_immediate_exit(0);
    }

    fn internal_error(&mut self) -> Exit {
        let (kind, bytes) = fd::internal_error(&mut self.fd);
        let what = match kind {
            1 => "KVM cannot emulate an instruction of the guest",
            2 => "the guest's exception handlers fault while another fault is delivered",
            3 => "KVM cannot deliver an event to the guest",
            _ => "KVM met an internal error",
        };
        let mut sentence = format!("{what} (suberror {kind})");
        if !bytes.is_empty() {
            sentence.push_str(", bytes");
            for byte in bytes {
                write!(sentence, " {byte:02x}").expect("a string takes all");
            }
        }
        self.broken(&sentence)
    }

    fn broken(&self, sentence: &str) -> Exit {
        Exit::Broken(format!("processor {}: {sentence}\n{}", self.id.index, self.registers()))
    }

    pub fn registers(&self) -> String {
        let (Ok(r), Ok(s)) = (self.fd.get_regs(), self.fd.get_sregs()) else {
            return "the registers cannot be read".into();
        };
        format!(
            "rip {:016x} rsp {:016x} rflags {:08x}\n\
             rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}\n\
             rsi {:016x} rdi {:016x} rbp {:016x} r8  {:016x}\n\
             r9  {:016x} r10 {:016x} r11 {:016x} r12 {:016x}\n\
             r13 {:016x} r14 {:016x} r15 {:016x}\n\
             cr0 {:08x} cr2 {:016x} cr3 {:016x} cr4 {:08x} efer {:x}\n\
             cs {:04x} base {:016x} limit {:08x} l={} db={}  ss {:04x}  ds {:04x}  tr {:04x}",
            r.rip,
            r.rsp,
            r.rflags,
            r.rax,
            r.rbx,
            r.rcx,
            r.rdx,
            r.rsi,
            r.rdi,
            r.rbp,
            r.r8,
            r.r9,
            r.r10,
            r.r11,
            r.r12,
            r.r13,
            r.r14,
            r.r15,
            s.cr0,
            s.cr2,
            s.cr3,
            s.cr4,
            s.efer,
            s.cs.selector,
            s.cs.base,
            s.cs.limit,
            s.cs.l,
            s.cs.db,
            s.ss.selector,
            s.ds.selector,
            s.tr.selector
        )
    }
}

impl PowerOn {
    fn of(kvm: &Kvm, fd: &VcpuFd) -> anyhow::Result<Self> {
        Ok(Self {
            regs: fd.get_regs().context("registers")?,
            sregs: fd.get_sregs().context("system registers")?,
            fpu: fd.get_fpu().context("floating-point registers")?,
            xcrs: fd.get_xcrs().ok(),
            msrs: msrs(kvm, fd)?,
            lapic: fd.get_lapic().context("the local interrupt controller")?,
            events: fd.get_vcpu_events().context("pending events")?,
            debug: fd.get_debug_regs().context("debug registers")?,
            nested: None,
        })
    }
}

/// All MSRs that KVM saves for a processor, except the time stamp counter.
fn msrs(kvm: &Kvm, fd: &VcpuFd) -> anyhow::Result<Vec<kvm_msr_entry>> {
    let list = kvm.get_msr_index_list().context("the list of MSRs")?;
    let listed = list.as_slice().iter().copied().filter(|index| !TSC.contains(index));
    let wanted = listed.chain(UNLISTED.iter().cloned().flatten());
    let mut wanted: Vec<_> =
        wanted.map(|index| kvm_msr_entry { index, ..Default::default() }).collect();
    let mut known: Vec<kvm_msr_entry> = Vec::new();
    // KVM stops at the first MSR that this processor does not have.
    while !wanted.is_empty() {
        let mut batch = Msrs::from_entries(&wanted).context("a list of MSRs")?;
        let count = fd.get_msrs(&mut batch).context("MSRs")?;
        known.extend(&batch.as_slice()[..count]);
        wanted.drain(..(count + 1).min(wanted.len()));
    }
    // KVM takes no hypercall page, not even none, from a guest without a name: clear it first.
    known.sort_by_key(|msr| msr.index != HYPERCALL);
    Ok(known)
}

/// Writes many MSRs. KVM stops at each one that refuses its value; the loop continues after it.
fn set_msrs(fd: &VcpuFd, mut msrs: &[kvm_msr_entry]) -> anyhow::Result<()> {
    while !msrs.is_empty() {
        let batch = Msrs::from_entries(msrs).context("a list of MSRs")?;
        let count = fd.set_msrs(&batch).context("MSRs")?;
        if let Some(refused) = msrs.get(count) {
            tracing::trace!("MSR {:#x} does not take {:#x}", refused.index, refused.data);
        }
        msrs = msrs.get(count + 1..).unwrap_or_default();
    }
    Ok(())
}

/// Writes an MSR. If the processor does not have it or refuses the value, it stays unchanged.
/// Returns whether it was written.
fn set_msr(fd: &VcpuFd, index: u32, data: u64) -> bool {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    let written = Msrs::from_entries(&[entry]).map(|msrs| fd.set_msrs(&msrs));
    let done = matches!(written, Ok(Ok(1)));
    if !done {
        tracing::trace!("MSR {index:#x} does not take {data:#x}");
    }
    done
}

fn get_msr(fd: &VcpuFd, index: u32) -> Option<u64> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }]).ok()?;
    (fd.get_msrs(&mut msrs) == Ok(1)).then(|| msrs.as_slice()[0].data)
}
