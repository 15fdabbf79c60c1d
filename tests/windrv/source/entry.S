# The entry (PVH: 32-bit protected mode without paging, EBX = start info) and all code of ring 0.
#
# Everything else runs in ring 3, which is fast even where a hypervisor interprets ring 0.
# Interrupts are disabled there. The gate below enables them, stubs count them, and the port driver
# calls the miniports' handlers after the gate has returned.

    .set COUNTS, 0x40                   # INTX_VECTOR + 16: from here on the stub ends the interrupt
    .set VECTORS, 128
    .set PROCESSORS, 4                  # as in machine.h, like the sizes of stacks
    .set TSS_BYTES, 104 + 8192 + 1 + 15 # with an I/O permission bitmap
    .set RING0_STACK, 4096
    .set RING3_STACK, 262144

    .section .pvh, "dr"
    .balign 4
    .globl pvh_note
pvh_note:
    .long 4, 4, 18                      # name size, descriptor size, XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long windrv_entry

    .section .tables, "dw"
    .balign 4096
    .globl page_map
page_map:
    .quad page_directory_pointers + 7
    .fill 511, 8, 0
page_directory_pointers:
    .quad page_directories + 0x0007
    .quad page_directories + 0x1007
    .quad page_directories + 0x2007
    .quad page_directories + 0x3007
    .fill 508, 8, 0
# The first 4 GiB are mapped at their own addresses in pages of 2 MiB. The last GiB is uncached,
# because the devices are there.
page_directories:
    .set page, 0
    .rept 1536
    .quad page * 0x200000 + 0x87
    .set page, page + 1
    .endr
    .rept 512
    .quad page * 0x200000 + 0x9f
    .set page, page + 1
    .endr

    .data
    .balign 16
gdt:
    .quad 0
    .quad 0x00af9b000000ffff            # 0x08 ring-0 code, 64 bit
    .quad 0x00cf93000000ffff            # 0x10 ring-0 data
    .quad 0x00cff3000000ffff            # 0x18 ring-3 data
    .quad 0x00affb000000ffff            # 0x20 ring-3 code, 64 bit
    .quad 0x00cf9b000000ffff            # 0x28 ring-0 code, 32 bit
    .rept PROCESSORS
    .quad 0x0000890000002068            # 0x30, 0x40 and so on: the TSS of each processor
    .quad 0
    .endr
gdt_end:
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
no_idt:
    .word 0
    .quad 0
    .balign 4
    .globl processors_present
processors_present:
    .long 1

    .bss
    .balign 4096
    .globl idt
idt:
    .space PROCESSORS * VECTORS * 16
    .balign 4096
tss:
    .space PROCESSORS * TSS_BYTES
    .balign 4096
ring0_stacks:
    .space PROCESSORS * RING0_STACK
    .globl ring3_stacks
ring3_stacks:
    .space PROCESSORS * RING3_STACK
    .balign 16
    .globl interrupt_counts, fault_record
interrupt_counts:
    .space PROCESSORS * VECTORS * 4
fault_record:
    .space 48
fault_count:
    .space 4

    .text
    .code32
    .globl windrv_entry
windrv_entry:
    xorl %esi, %esi
protected_entry:                        # ESI: the number of this processor
    cli
    cld
    lgdt gdt_pointer
    movl %cr4, %eax
    orl $0x20, %eax                     # PAE
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
    imull $TSS_BYTES, %esi, %edi
    addl $tss, %edi
    movl %esi, %edx
    shll $4, %edx
    movl %edi, %eax
    movw %ax, gdt + 0x32(%rdx)
    shrl $16, %eax
    movb %al, gdt + 0x34(%rdx)
    movb %ah, gdt + 0x37(%rdx)
    imull $RING0_STACK, %esi, %eax
    addl $ring0_stacks + RING0_STACK, %eax
    movl %eax, %esp
    movl %eax, 4(%rdi)                  # RSP0
    movl $0, 8(%rdi)
    movl $0x680000, 100(%rdi)           # the bitmap is at 104: all zero, all ports allowed
    movb $0xff, 104 + 8192(%rdi)
    leal 0x30(%rdx), %eax
    ltr %ax
    movl $0x10, %eax
    movl %eax, %ss
    imull $VECTORS * 16, %esi, %eax
    addl $idt, %eax
    movq %rax, -8(%rsp)
    movw $VECTORS * 16 - 1, -10(%rsp)
    lidt -10(%rsp)
    movl $0x1b, %eax
    movl %eax, %ds
    movl %eax, %es
    imull $RING3_STACK, %esi, %eax
    addl $ring3_stacks + RING3_STACK, %eax
    pushq $0x1b
    pushq %rax
    pushq $2
    pushq $0x23
    pushq $ring3_entry
    iretq
ring3_entry:
    subq $48, %rsp
    testl %esi, %esi
    jnz 1f
    movl %ebx, %ecx
    call windrv
1:  movl %esi, %ecx
    call windrv_processor
    ud2

# The other processors begin here, in real mode, in a copy in the page that the startup IPI names.
    .balign 16
    .code16
    .globl trampoline, trampoline_end
trampoline:
    cli
    lgdtl %cs:trampoline_gdt - trampoline
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    .byte 0x66, 0xea                    # a far jump to 32-bit code
    .long processor_entry
    .word 0x28
trampoline_gdt:
    .word gdt_end - gdt - 1
    .long gdt
trampoline_end:
    .code32
processor_entry:
    movl $0x10, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl $1, %esi
    lock xaddl %esi, processors_present
    cmpl $PROCESSORS, %esi
    jb protected_entry
1:  hlt
    jmp 1b
    .code64

# Exceptions: ring 3 reports the first one (windrv_fault), a second one ends the machine. The mask
# has a bit for each vector that pushes an error code.
    .balign 16
    .globl exception_stubs
exception_stubs:
    .set vector, 0
    .rept 32
    .balign 16
    .if ((0x60227d00 >> vector) & 1) == 0
    pushq $0
    .endif
    pushq $vector
    jmp exception
    .set vector, vector + 1
    .endr
exception:
    cmpl $0, fault_count
    jne triple
    incl fault_count
    movq %rax, fault_record + 24
    popq %rax
    movq %rax, fault_record
    popq %rax
    movq %rax, fault_record + 8
    popq %rax
    movq %rax, fault_record + 16
    movq 16(%rsp), %rax
    movq %rax, fault_record + 40
    movq %cr2, %rax
    movq %rax, fault_record + 32
    pushq $0x1b
    pushq $ring3_stacks + RING3_STACK / 2
    pushq $2
    pushq $0x23
    pushq $fault_entry
    iretq
fault_entry:
    subq $48, %rsp
    call windrv_fault
    ud2

# Interrupts are counted, by each processor for itself. Those of messages and the timer end here.
# INTx ends when the driver's handler has run (end_of_interrupt_intx): until then its level would
# raise it again.
    .balign 16
    .globl interrupt_stubs
interrupt_stubs:
    .set processor, 0
    .rept PROCESSORS
    .set vector, 32
    .rept VECTORS - 32
    .balign 16
    incl interrupt_counts + 4 * (processor * VECTORS + vector)
    .if vector >= COUNTS
    jmp end_of_interrupt
    .else
    iretq
    .endif
    .set vector, vector + 1
    .endr
    .set processor, processor + 1
    .endr
end_of_interrupt:
    pushq %rax
    movl $0xfee000b0, %eax
    movl $0, (%rax)
    popq %rax
    iretq

# The gate out of ring 3 is INT3: a hypervisor that interprets ring 0 may know neither SYSCALL nor
# INT n. RAX = 0: wait for an interrupt; 1: take pending interrupts; 2: end the machine.
    .balign 16
    .globl gate_stub
gate_stub:
    cmpl $1, %eax
    je 1f
    ja triple
    sti
    hlt
    cli
    iretq
1:  sti
    nop
    nop
    cli
    iretq
triple:
    lidt no_idt
    movl $idt, %eax                     # no page table: the next fetch is a triple fault
    movq %rax, %cr3
    iretq
