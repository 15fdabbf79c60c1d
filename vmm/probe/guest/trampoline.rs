//! The start of the other processors, and what they do in ring 0: wait for commands (peers.rs).
use core::arch::global_asm;

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
    .globl peers
peers:
    .skip 63 * 1024
"#,
    options(att_syntax)
);

/// Address of the trampoline. SIPI vector 8.
pub(crate) const TRAMPOLINE: usize = 0x8000;

unsafe extern "C" {
    static peers: u8;
    static trampoline: u8;
    static trampoline_end: u8;
    static mut processors_started: u32;
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
