# The entry (PVH: 32-bit protected mode without paging, EBX = start info) and all code of ring 0.
#
# Everything else runs in ring 3, which is fast even where a hypervisor interprets ring 0.
# Interrupts are disabled there. The gate below enables them, stubs count them, and the port driver
# calls the miniports' handlers after the gate has returned.

    .set COUNTS, 0x40                   # INTX_VECTOR + 16: from here on the stub ends the interrupt
    .set VECTORS, 128

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
    .quad 0x0000890000002068            # 0x28 TSS with an I/O permission bitmap of 8193 bytes
    .quad 0
gdt_end:
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
idt_pointer:
    .word VECTORS * 16 - 1
    .quad idt
no_idt:
    .word 0
    .quad 0

    .bss
    .balign 4096
    .globl idt
idt:
    .space VECTORS * 16
    .balign 4096
tss:
    .space 104
io_bitmap:
    .space 8192 + 1
    .balign 4096
    .space 4096
ring0_stack:
    .space 262144
ring3_stack:
    .balign 16
    .globl interrupt_counts, fault_record
interrupt_counts:
    .space VECTORS * 4
fault_record:
    .space 48
fault_count:
    .space 4

    .text
    .code32
    .globl windrv_entry
windrv_entry:
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
    movl $tss, %eax
    movl %eax, %ecx
    movw %ax, gdt + 0x2a
    shrl $16, %ecx
    movb %cl, gdt + 0x2c
    movb %ch, gdt + 0x2f
    movl $ring0_stack, 4(%rax)          # RSP0
    movl $0, 8(%rax)
    movl $0x680000, 100(%rax)           # the bitmap is at 104: all zero, all ports allowed
    movl $0x28, %eax
    ltr %ax
    lidt idt_pointer
    movl $0x10, %eax
    movl %eax, %ss
    movl $0x1b, %eax
    movl %eax, %ds
    movl %eax, %es
    movl $ring0_stack, %esp
    pushq $0x1b
    pushq $ring3_stack
    pushq $2
    pushq $0x23
    pushq $ring3_entry
    iretq
ring3_entry:
    movb $0xff, io_bitmap + 8192
    movl %ebx, %ecx
    subq $48, %rsp
    call windrv
    ud2

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
    movl $ring0_stack, %esp
    pushq $0x1b
    pushq $ring3_stack - 131072
    pushq $2
    pushq $0x23
    pushq $fault_entry
    iretq
fault_entry:
    subq $48, %rsp
    call windrv_fault
    ud2

# Interrupts are counted. Those of messages and the timer end here. INTx ends when the driver's
# handler has run (end_of_interrupt_intx): until then its level would raise it again.
    .balign 16
    .globl interrupt_stubs
interrupt_stubs:
    .set vector, 32
    .rept VECTORS - 32
    .balign 16
    incl interrupt_counts + 4 * vector
    .if vector >= COUNTS
    jmp end_of_interrupt
    .else
    iretq
    .endif
    .set vector, vector + 1
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
