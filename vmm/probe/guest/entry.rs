//! The entry point, and all code that runs in ring 0.
//!
//! A paravirtual-only KVM interprets ring 0, at about a million instructions per second, and does
//! not support all instructions. Only this file therefore runs in ring 0: straight-line assembly of
//! plain integer instructions that ends in ring 3, interrupt stubs, one gate for the few privileged
//! operations, and the start of other processors. Page tables are static data, so no loop has to
//! build them.
use core::arch::{asm, global_asm};

// Entry (PVH): 32-bit protected mode, flat segments, no paging, EBX = start info.
global_asm!(
    r#"
    .section .note.pvh, "a", @note
    .balign 4
    .long 4, 4, 18                      # name size, descriptor size, XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long pvh_entry

    # The first 4 GiB map to themselves: user, writable, 2 MiB pages. Ring 0 finds the first GiB
    # filled in; the rest is filled in by ring 3, at native speed.
    .section .tables, "aw", @progbits
    .globl page_map
page_map:
    .quad page_directory_pointers + 7
    .fill 511, 8, 0
page_directory_pointers:
    .quad page_directory + 7
    .quad page_directories + 0x0007
    .quad page_directories + 0x1007
    .quad page_directories + 0x2007
    .fill 508, 8, 0
page_directory:
    .set page, 0
    .rept 512
    .quad page * 0x200000 + 0x87
    .set page, page + 1
    .endr

    .section .data
    .balign 16
gdt:
    .quad 0
    .quad 0x00af9b000000ffff            # 0x08 ring-0 code, 64 bit
    .quad 0x00cf93000000ffff            # 0x10 ring-0 data
    .quad 0x00cff3000000ffff            # 0x18 ring-3 data
    .quad 0x00affb000000ffff            # 0x20 ring-3 code, 64 bit
    .quad 0x0000890000002068            # 0x28 TSS, 104 + 8192 + 1 bytes; base filled in at entry
    .quad 0
gdt_end:
    .globl gdt_pointer
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
idt_pointer:
    .word 128 * 16 - 1
    .quad idt
no_idt:
    .word 0
    .quad 0

    .section .early, "aw", @nobits
    .balign 4096
page_directories:
    .skip 3 * 4096
    .globl idt
idt:
    .skip 4096
    .globl tss
tss:
    .skip 104
    .globl io_bitmap
io_bitmap:
    .skip 8193
    .balign 4096
    .skip 4096
ring0_stack:
    .skip 16384
fault_stack:
    .skip 262144
ring3_stack:

    .section .text.entry, "ax"
    .code32
    .globl pvh_entry
pvh_entry:
    cli
    cld
    lgdt gdt_pointer
    movl %cr4, %eax
    orl $0x620, %eax                    # PAE, OSFXSR, OSXMMEXCPT
    movl %eax, %cr4
    movl $page_map, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx              # EFER
    rdmsr
    orl $0x100, %eax                    # LME
    wrmsr
    movl %cr0, %eax
    andl $0x9ffffff3, %eax              # not CD, NW, TS, EM
    orl $0x80000023, %eax               # PG, NE, MP, PE
    movl %eax, %cr0
    ljmp $0x08, $long_entry

    .code64
long_entry:
    movl $tss, %eax
    movl %eax, %ecx
    movw %ax, gdt + 0x2a
    shrl $16, %ecx
    movb %cl, gdt + 0x2c
    movb %ch, gdt + 0x2f
    movl $ring0_stack, 4(%rax)          # RSP0
    movl $0, 8(%rax)
    movl $0x680000, 100(%rax)           # the I/O bitmap follows at 104
    movl $0x28, %eax
    ltr %ax
    lidt idt_pointer
    movl $0x10, %eax
    movl %eax, %ss
    movl $0x1b, %eax
    movl %eax, %ds
    movl %eax, %es
    movl $ring0_stack, %esp
    movl %ebx, %edi
    pushq $0x1b
    pushq $ring3_stack
    pushq $2
    pushq $0x23
    pushq $ring3_entry
    iretq

    # Ring 3 from here: native speed everywhere.
ring3_entry:
    movl %edi, %ebx
    xorl %eax, %eax
    movl $io_bitmap, %edi               # all ports allowed
    movl $1024, %ecx
    rep stosq
    movb $0xff, (%rdi)
    movb $0x74, %al                     # 't': first sign of life, before anything slow
    movw $0x3f8, %dx
    outb %al, %dx
    movl $page_directories, %edi
    movl $0x40000087, %eax
1:  cmpl $0xc0000087, %eax
    jne 2f
    orl $0x18, %eax                     # device memory from here on: uncached
2:  movq %rax, (%rdi)
    addl $8, %edi
    addl $0x200000, %eax
    jnc 1b
    movl $bss_start, %edi
    movl $bss_end, %ecx
    subl %edi, %ecx
    xorl %eax, %eax
    rep stosb
    movl %ebx, %edi
    xorl %ebp, %ebp
    call ring3_main
    ud2
"#,
    options(att_syntax)
);

// Interrupts, exceptions and the gate. A stub is 16 bytes long, so that ring 3 can compute its
// address for the IDT.
global_asm!(
    r#"
    .section .text.entry, "ax"
    .balign 16
    .globl exception_stubs
exception_stubs:
    .set vector, 0
    .rept 32
    .balign 16
    # 8, 10-14, 17, 21, 29 and 30 come with an error code.
    .ifeq (0x60227d00 >> vector) & 1
    pushq $0
    .endif
    pushq $vector
    jmp exception
    .set vector, vector + 1
    .endr

    # RDMSR and WRMSR of a register that faults are skipped, with the carry flag set. The first
    # other exception is shown by ring 3; a second one ends the machine.
exception:
    cmpl $13, (%rsp)
    jne 1f
    pushq %rax
    movq 24(%rsp), %rax                 # RIP
    cmpq $gate_may_fault, %rax
    je skip
    cmpq $gate_may_fault_too, %rax
    je skip
    cmpq $peer_may_fault, %rax
    je skip
    cmpq $peer_may_fault_too, %rax
    je skip
    popq %rax
    jmp 1f
skip:
    addq $2, 24(%rsp)
    orl $1, 40(%rsp)                    # RFLAGS
    popq %rax
    addq $16, %rsp
    iretq
1:  cmpl $0, fault_count
    jne second_exception
    incl fault_count
    movq %rax, fault_record + 24
    popq %rax
    movq %rax, fault_record
    popq %rax
    movq %rax, fault_record + 8
    popq %rax
    movq %rax, fault_record + 16
    movq %cr2, %rax
    movq %rax, fault_record + 32
    movl $ring0_stack, %esp
    pushq $0x1b
    pushq $fault_stack
    pushq $2
    pushq $0x23
    pushq $fault_entry
    iretq

second_exception:
    popq %rax
    popq %rax
    jmp gate_triple

fault_entry:
    movl $fault_record, %edi
    call ring3_fault
    ud2

    .balign 16
    .globl nmi_stub
nmi_stub:
    incl nmi_count
    iretq

    .balign 16
    .globl timer_stub
timer_stub:
    incl timer_count
    pushq %rax
    movl $0xfee000b0, %eax              # end of interrupt
    movl $0, (%rax)
    popq %rax
    iretq

    .balign 16
    .globl device_stub
device_stub:
    incl device_count
    pushq %rax
    movl $0xfee000b0, %eax
    movl $0, (%rax)
    popq %rax
    iretq

    # An interrupt that needs no end of interrupt if the hypervisor says so in the assist page.
    .balign 16
    .globl assisted_stub
assisted_stub:
    pushq %rax
    btrl $0, assist_page
    jc 1f
    incl unassisted_count
    movl $0xfee000b0, %eax
    movl $0, (%rax)
1:  incl assisted_count
    popq %rax
    iretq

    # An interrupt of another processor, counted in its slot.
    .balign 16
    .globl peer_stub
peer_stub:
    pushq %rax
    movq %rsp, %rax
    andq $-1024, %rax
    incl 24(%rax)
    jmp 1f
    .balign 16
    .globl wake_stub
wake_stub:
    pushq %rax
1:  movl $0xfee000b0, %eax
    movl $0, (%rax)
    popq %rax
    iretq

    .balign 16
    .globl spurious_stub
spurious_stub:
    incl spurious_count
    iretq

    # The gate is INT3: a paravirtual-only KVM makes INT n an invalid opcode, and runs what SYSCALL
    # enters without privileges. RAX = function, RDI and RSI (R8, R9 for a hypercall) = arguments;
    # RAX, R8 (for RBX; carry of a register's access), RCX, RDX = results.
    .globl gate_stub
gate_stub:
    cmpl $1, %eax
    jb gate_halt_once
    je gate_rdmsr
    cmpl $3, %eax                       # 2 interrupts, 3 control
    jb gate_interrupts
    je gate_control
    cmpl $5, %eax
    jb gate_cpuid
    je gate_halt
    cmpl $7, %eax
    je gate_wrmsr
    ja gate_hypercall
gate_triple:
    lidt no_idt
    movl $tss + 4096, %eax              # zeros of the I/O bitmap: nothing is mapped any more
    movq %rax, %cr3
    iretq
gate_halt_once:
    sti
    hlt
    cli
    iretq
gate_rdmsr:
    movl %edi, %ecx
    clc
gate_may_fault:
    rdmsr
    setc %r8b
    iretq
gate_wrmsr:
    movl %edi, %ecx
    movl %esi, %eax
    movq %rsi, %rdx
    shrq $32, %rdx
    clc
gate_may_fault_too:
    wrmsr
    setc %r8b
    iretq
gate_hypercall:
    movq %rdi, %rcx
    movq %rsi, %rdx
    call *%r9
    iretq
gate_interrupts:                        # RDI = RFLAGS from now on
    movq %rdi, 16(%rsp)
    iretq
gate_control:
    movq %cr0, %rax
    movq %cr3, %rdx
    movq %cr4, %rcx
    iretq
gate_cpuid:
    movl %edi, %eax
    movl %esi, %ecx
    movq %rbx, %r8
    cpuid
    xchgq %rbx, %r8
    iretq
gate_halt:
    sti
    hlt
    jmp gate_halt

    .section .bss
    .balign 8
    .globl fault_record, fault_count, nmi_count, timer_count, device_count
    .globl spurious_count, assisted_count, unassisted_count
fault_record:
    .skip 40
fault_count:
    .skip 4
nmi_count:
    .skip 4
timer_count:
    .skip 4
device_count:
    .skip 4
spurious_count:
    .skip 4
assisted_count:
    .skip 4
unassisted_count:
    .skip 4
"#,
    options(att_syntax)
);

// The code of another processor after INIT-SIPI, copied to TRAMPOLINE: real mode, long mode, count.
global_asm!(
    r#"
    .section .data
    .code16
    .globl trampoline, trampoline_end
trampoline:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl 0x8000 + trampoline_gdt - trampoline
    movl %cr4, %eax
    orl $0x20, %eax
    movl %eax, %cr4
    movl $page_map, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    andl $0x9fffffff, %eax              # not CD, NW: set by INIT
    orl $0x80000001, %eax               # PG and PE at once: straight to long mode
    movl %eax, %cr0
    ljmpl $0x08, $processor_entry
trampoline_gdt:
    .word gdt_end - gdt - 1
    .long gdt
trampoline_end:

    .section .text.entry, "ax"
    .code64
processor_entry:
    movl $0x10, %eax
    movl %eax, %ss
    movl $1, %eax
    lock xaddl %eax, processors_numbered
    cmpl $63, %eax
    jae peer_without_slot
    shll $10, %eax
    addl $peers, %eax
    movl %eax, %ebx
    leaq 1024(%rbx), %rsp
    lidt idt_pointer
    movl $0xfee000f0, %eax              # the local APIC accepts interrupts
    movl $0x14f, (%rax)
    movl $0xfee00020, %eax
    movl (%rax), %eax
    shrl $24, %eax
    movl %eax, 4(%rbx)
    lock incl processors_started
    # Slot: command, APIC ID, argument (8), value (16), interrupts (24), carry (32); then the stack.
1:  cli
    cmpl $0, (%rbx)
    jne 2f
    sti
    hlt
    jmp 1b
2:  movl 8(%rbx), %ecx
    movl 16(%rbx), %eax
    movl 20(%rbx), %edx
    cmpl $2, (%rbx)
    jb 3f
    je 4f
    movq 8(%rbx), %rax                  # 3: load
    movq (%rax), %rax
    movq %rax, 16(%rbx)
    jmp 5f
3:  clc                                 # 1: read a register
peer_may_fault:
    rdmsr
    setc 32(%rbx)
    movl %eax, 16(%rbx)
    movl %edx, 20(%rbx)
    jmp 5f
4:  clc                                 # 2: write a register
peer_may_fault_too:
    wrmsr
    setc 32(%rbx)
5:  movl $0, (%rbx)
    jmp 1b
peer_without_slot:
    lock incl processors_started
6:  cli
    hlt
    jmp 6b

    .section .early, "aw", @nobits
    .balign 8
    .globl processors_started, processors_numbered
processors_started:
    .skip 4
processors_numbered:
    .skip 4
    .balign 4096
    .globl assist_page, peers
assist_page:
    .skip 4096
peers:
    .skip 63 * 1024
"#,
    options(att_syntax)
);

/// Address of the trampoline. SIPI vector 8.
pub(crate) const TRAMPOLINE: usize = 0x8000;
/// Interrupt vector of the local APIC timer.
pub(crate) const TIMER_VECTOR: u8 = 0x40;
/// Interrupt vector of PCI devices (MSI-X) and of ISA devices.
pub(crate) const DEVICE_VECTOR: u8 = 0x41;
/// Interrupts that Hyper-V's assist page may acknowledge.
pub(crate) const ASSISTED_VECTOR: u8 = 0x42;
/// Interrupts of other processors: counted, or only to wake it.
pub(crate) const PEER_VECTOR: u8 = 0x43;
pub(crate) const WAKE_VECTOR: u8 = 0x44;
pub(crate) const SPURIOUS_VECTOR: u8 = 0x4f;
/// The vector of INT3.
const GATE_VECTOR: u64 = 3;

unsafe extern "C" {
    static exception_stubs: u8;
    static nmi_stub: u8;
    static timer_stub: u8;
    static device_stub: u8;
    static spurious_stub: u8;
    static assisted_stub: u8;
    static peer_stub: u8;
    static wake_stub: u8;
    static assist_page: u8;
    static peers: u8;
    static assisted_count: u32;
    static unassisted_count: u32;
    static gate_stub: u8;
    static mut idt: [[u64; 2]; 128];
    static mut page_map: [u64; 512];
    static trampoline: u8;
    static trampoline_end: u8;
    static timer_count: u32;
    static device_count: u32;
    static nmi_count: u32;
    static mut processors_started: u32;
    static image_start: u8;
    static image_end: u8;
}

/// First and last address (exclusive) of this image, including its stacks.
pub(crate) fn image() -> (u64, u64) {
    (&raw const image_start as u64, &raw const image_end as u64)
}

/// Fills the interrupt table. Before this, any exception ends the machine.
pub(crate) fn fill_interrupt_table() {
    for vector in 0..128u64 {
        let stub = match vector {
            2 => &raw const nmi_stub as u64,
            GATE_VECTOR => &raw const gate_stub as u64,
            0..32 => &raw const exception_stubs as u64 + vector * 16,
            v if v == u64::from(TIMER_VECTOR) => &raw const timer_stub as u64,
            v if v == u64::from(DEVICE_VECTOR) => &raw const device_stub as u64,
            v if v == u64::from(ASSISTED_VECTOR) => &raw const assisted_stub as u64,
            v if v == u64::from(PEER_VECTOR) => &raw const peer_stub as u64,
            v if v == u64::from(WAKE_VECTOR) => &raw const wake_stub as u64,
            _ => &raw const spurious_stub as u64,
        };
        let privilege = if vector == GATE_VECTOR { 3 } else { 0 };
        let low = stub & 0xffff | 8 << 16 | privilege << 45 | 0x8e00 << 32 | stub >> 16 << 48;
        let entry = (&raw mut idt).cast::<[u64; 2]>().wrapping_add(vector as usize);
        // SAFETY: 128 entries are reserved, and no interrupt arrives before this is done.
        unsafe { entry.write_volatile([low, 0]) };
    }
}

/// The top-level page table. Entries may be added at any time.
pub(crate) fn page_tables() -> *mut u64 {
    (&raw mut page_map).cast()
}

pub(crate) fn timer_interrupts() -> u32 {
    // SAFETY: an aligned counter that only an interrupt stub writes.
    unsafe { (&raw const timer_count).read_volatile() }
}

pub(crate) fn device_interrupts() -> u32 {
    // SAFETY: an aligned counter that only an interrupt stub writes.
    unsafe { (&raw const device_count).read_volatile() }
}

pub(crate) fn nmis() -> u32 {
    // SAFETY: an aligned counter that only an interrupt stub writes.
    unsafe { (&raw const nmi_count).read_volatile() }
}

/// Interrupts at [`ASSISTED_VECTOR`]: all, and those that needed an end of interrupt.
pub(crate) fn assisted_interrupts() -> (u32, u32) {
    // SAFETY: aligned counters that only an interrupt stub writes.
    unsafe {
        ((&raw const assisted_count).read_volatile(), (&raw const unassisted_count).read_volatile())
    }
}

/// The page by which the hypervisor acknowledges interrupts.
pub(crate) fn assist() -> u64 {
    &raw const assist_page as u64
}

/// The counter that each started processor increments, and one that numbers them.
pub(crate) fn started_counter() -> *mut u32 {
    &raw mut processors_started
}

/// The slots of the other processors, of 1 KiB each, and their number.
pub(crate) fn slots() -> (u64, u64) {
    (&raw const peers as u64, 63)
}

/// The code to be copied to [`TRAMPOLINE`].
pub(crate) fn trampoline_code() -> &'static [u8] {
    let start = &raw const trampoline;
    let length = &raw const trampoline_end as usize - start as usize;
    // SAFETY: the two symbols delimit initialized, constant bytes of this image.
    unsafe { core::slice::from_raw_parts(start, length) }
}

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
