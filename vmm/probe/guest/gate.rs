//! Privileged operations for ring 3, through the gate in entry.rs.
use core::arch::asm;

/// RAX, RBX, RCX and RDX after a call through the gate.
pub(crate) type Registers = [u64; 4];

fn gate(function: u64, first: u64, second: u64) -> Registers {
    let (a, b, c, d);
    // SAFETY: the stub returns here with the named registers changed and no others.
    unsafe {
        asm!("int3", inlateout("rax") function => a, in("rdi") first, in("rsi") second,
            lateout("rcx") c, lateout("rdx") d, lateout("r8") b);
    }
    [a, b, c, d]
}

pub(crate) fn halt_once() {
    gate(0, 0, 0);
}

/// Reads a model-specific register that exists.
pub(crate) fn read_msr(index: u32) -> u64 {
    try_read_msr(index).expect("the register")
}

/// Reads a model-specific register. `None`: it faults.
pub(crate) fn try_read_msr(index: u32) -> Option<u64> {
    let [low, carry, _, high] = gate(1, index.into(), 0);
    (carry & 0xff == 0).then_some(high << 32 | low & 0xffff_ffff)
}

/// Writes a model-specific register. Returns false if that faults.
pub(crate) fn write_msr(index: u32, value: u64) -> bool {
    gate(7, index.into(), value)[1] & 0xff == 0
}

/// Calls the hypercall page with RCX, RDX, R8 and the six XMM registers. Returns RAX.
pub(crate) fn hypercall(page: u64, control: u64, pair: [u64; 2], xmm: &[[u64; 2]; 6]) -> u64 {
    let result;
    // SAFETY: the page is the hypervisor's code, which changes no other registers and no memory but
    // that of the call.
    unsafe {
        asm!(
            "movups xmm0, [{x}]", "movups xmm1, [{x} + 16]", "movups xmm2, [{x} + 32]",
            "movups xmm3, [{x} + 48]", "movups xmm4, [{x} + 64]", "movups xmm5, [{x} + 80]",
            "int3",
            x = in(reg) xmm.as_ptr(), inlateout("rax") 8_u64 => result,
            inlateout("rdi") control => _, inlateout("rsi") pair[0] => _,
            inlateout("r8") pair[1] => _, inlateout("r9") page => _,
            lateout("rcx") _, lateout("rdx") _, lateout("r10") _, lateout("r11") _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _,
            out("xmm5") _,
        );
    }
    result
}

pub(crate) fn set_interrupts(on: bool) {
    gate(2, if on { 0x202 } else { 2 }, 0);
}

/// CR0, CR3 and CR4.
pub(crate) fn control_registers() -> [u64; 3] {
    let [cr0, _, cr4, cr3] = gate(3, 0, 0);
    [cr0, cr3, cr4]
}

/// CPUID as ring 0 sees it. If ring 3 runs natively, CPUID there may return the host's values.
pub(crate) fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    gate(4, leaf.into(), subleaf.into()).map(|register| register as u32)
}

/// Halts forever with interrupts enabled: an idle guest.
pub(crate) fn halt() -> ! {
    gate(5, 0, 0);
    unreachable!()
}

/// Raises an exception without an interrupt table, so that the processor shuts down.
pub(crate) fn triple_fault() -> ! {
    gate(6, 0, 0);
    // SAFETY: raises an exception, which ends the machine.
    unsafe { asm!("ud2", options(noreturn)) }
}
