//! One processor: its power-on state, running it until the next exit, and its registers for error
//! messages.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use devices::bus::Spaces;
use kvm_bindings::{
    CpuId, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_enable_cap, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs,
};
use kvm_ioctls::{Cap, Kvm, ReadMsrExit, VcpuExit, VcpuFd, WriteMsrExit};

use super::fd::{self, MemoryAccess, Runner};
use super::smm::{self, Smm};
use super::state;
use super::vm::Vm;
use crate::cpuid;
use crate::hyperv::{Provider, Written, is_register};
use crate::msr::Registers;

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

/// KVM_SYSTEM_EVENT_CRASH, and the MSRs in which Hyper-V guests report the reason.
const CRASH: u32 = 3;
const CRASH_PARAMETERS: RangeInclusive<u32> = 0x4000_0100..=0x4000_0104;

pub struct Vcpu {
    fd: VcpuFd,
    id: ProcessorId,
    /// The state that a reset restores.
    power_on: state::Processor,
    /// `None` in a machine without system-management mode.
    smm: Option<Arc<Smm>>,
    runner: Arc<Runner>,
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
                state::set_msr(&fd, SCONTROL.0, SCONTROL.1);
            }
            state::set_msr(&fd, CRASH_CTL.0, CRASH_CTL.1);
        }
        fd::set_up_machine_checks(kvm, &fd);
        state::set_msr(&fd, MISC_ENABLE.0, MISC_ENABLE.1);
        let nested = cpuid::is_nested(cpuid.as_slice());
        state::set_msr(&fd, FEATURE_CONTROL, if nested { LOCKED | WITH_VMX } else { LOCKED });
        // The first processor runs. The others wait until it starts them.
        let mp_state =
            if id.index == 0 { KVM_MP_STATE_RUNNABLE } else { KVM_MP_STATE_UNINITIALIZED };
        fd.set_mp_state(kvm_mp_state { mp_state }).context("the state of a processor")?;
        let power_on = state::Processor::new(kvm, &fd, nested)?;
        let smm = vm.smm.clone();
        let runner = smm.as_ref().map_or_else(Arc::default, |smm| smm.runner(id.index));
        Ok(Self { fd, id, power_on, smm, runner })
    }

    /// The thread that runs this processor.
    pub fn runner(&self) -> &Arc<Runner> {
        &self.runner
    }

    pub fn reset(&self) -> anyhow::Result<()> {
        // KVM drops it with the old state.
        self.take_smi()?;
        self.power_on.set(&self.fd)
    }

    /// Gives KVM the SMI that the processor has to take, before its next instruction.
    fn take_smi(&self) -> anyhow::Result<()> {
        match &self.smm {
            Some(smm) if smm.take_smi(self.id.index) => {
                self.fd.smi().context("a system-management interrupt")
            }
            _ => Ok(()),
        }
    }

    /// The state of a processor that is paused, for a snapshot.
    pub fn state(&self) -> anyhow::Result<(state::Processor, state::Tsc)> {
        self.take_smi()?;
        Ok((self.power_on.now(&self.fd)?, state::Tsc::of(&self.fd)?))
    }

    /// Adds the interrupts that have reached the processor's local controller since.
    pub fn add_interrupts(&self, state: &mut state::Processor) -> anyhow::Result<()> {
        state.add_interrupts(&self.fd)
    }

    /// The clocks for a snapshot, and this process's at the same moment. This is the first
    /// processor, and all are paused.
    pub fn clock(&self, vm: &Vm) -> anyhow::Result<(state::Clock, Instant)> {
        state::Clock::of(&vm.fd, &self.fd)
    }

    /// Lets all clocks go on from those of a snapshot. Returns the moment at which they were there.
    pub fn continue_clock(vm: &Vm, all: &[&Self], clock: state::Clock) -> anyhow::Result<Instant> {
        clock.set(&vm.fd, &all.iter().map(|vcpu| &vcpu.fd).collect::<Vec<_>>())
    }

    /// Lets the time stamp counter continue from that of a snapshot. `first` is the counter of the
    /// first processor, in the snapshot and now; that processor has none. Returns the counter.
    pub fn restore_tsc(
        &self,
        vm: &Vm,
        tsc: state::Tsc,
        first: Option<(state::Tsc, state::Tsc)>,
    ) -> anyhow::Result<state::Tsc> {
        tsc.set(&self.fd, first, vm.fd.check_extension(Cap::TscControl))?;
        state::Tsc::of(&self.fd)
    }

    /// Continues from the state of a snapshot.
    pub fn restore(&self, state: &state::Processor) -> anyhow::Result<()> {
        state.set(&self.fd)?;
        let lost = state.different_msrs(&self.fd)?;
        if !lost.is_empty() {
            let index = self.id.index;
            tracing::warn!("processor {index}: this host's KVM does not restore MSRs {lost:x?}");
        }
        Ok(())
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
            state::set_msr(&self.fd, *index, *value);
        }
        Ok(())
    }

    /// Lets the kick signal stop this processor while it runs on this thread.
    pub fn kickable(&mut self) -> impl Drop + use<> {
        fd::Kickable::new(&mut self.fd, self.runner.clone())
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
        if let Err(error) = self.take_smi() {
            return self.broken(&format!("{error:#}"));
        }
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
        let old = state::get_msr(&self.fd, index).unwrap_or(0);
        smm.allows(index, old, value) && state::set_msr(&self.fd, index, value)
    }

    /// The rate of the time stamp counter.
    pub fn tsc_hertz(&self) -> anyhow::Result<u64> {
        Ok(u64::from(state::tsc_khz(&self.fd)?) * 1000)
    }

    /// The time stamp counter as the guest reads it.
    pub fn tsc(&self) -> anyhow::Result<u64> {
        state::tsc(&self.fd)
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
