//! The entry point, and the first processor's code in ring 0.
//!
//! A paravirtual-only KVM interprets ring 0, at about a million instructions per second, and does
//! not support all instructions. Only this file and trampoline.rs therefore run in ring 0, in
//! straight-line assembly of plain integer instructions: the way to ring 3, interrupt stubs, and
//! one gate for the few privileged operations (gate.rs). Page tables are static data, so no loop
//! has to build them.
use core::arch::global_asm;

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
    .globl assist_page, idt
assist_page:
    .skip 4096
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
    static assisted_count: u32;
    static unassisted_count: u32;
    static gate_stub: u8;
    static mut idt: [[u64; 2]; 128];
    static mut page_map: [u64; 512];
    static timer_count: u32;
    static device_count: u32;
    static nmi_count: u32;
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
