/* The processor and the serial port, used without the firmware. */
#include "loader.h"

enum { SERIAL = 0x3f8, FIFO_CONTROL = SERIAL + 2, LINE_STATUS = SERIAL + 5, FIFO = 16 };
enum { EMPTY = 1 << 5, VECTORS = 32, STUB = 16, CODE = 8 };

void out8(half port, byte value)
{
  asm volatile("outb %0, %1" :: "a"(value), "Nd"(port));
}

byte in8(half port)
{
  byte value;
  asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

void out32(half port, dword value)
{
  asm volatile("outl %0, %1" :: "a"(value), "Nd"(port));
}

dword in32(half port)
{
  dword value;
  asm volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

word cycles(void)
{
  dword low, high;
  asm volatile("rdtsc" : "=a"(low), "=d"(high));
  return (word)high << 32 | low;
}

/* An empty FIFO takes 16 bytes. */
void print(const char *text, word length)
{
  for (word at = 0; at < length; at++) {
    if (at % FIFO == 0)
      while (!(in8(LINE_STATUS) & EMPTY))
        ;
    out8(SERIAL, text[at]);
  }
}

void halt(void)
{
  for (;;)
    asm volatile("cli; hlt");
}

extern byte stubs[];

/* frame: the vector, then what the processor pushed. */
void trap(word *frame)
{
  word address;
  asm volatile("mov %%cr2, %0" : "=r"(address));
  say("wrong: exception %d, stack %x %x %x, address %x\n", frame[0], frame[1], frame[2], frame[3],
    address);
  halt();
}

asm(".balign 16\n"
    "stubs:\n"
    ".set vector, 0\n"
    ".rept 32\n"
    ".balign 16\n"
    "pushq $vector\n"
    "jmp trapped\n"
    ".set vector, vector + 1\n"
    ".endr\n"
    "trapped:\n"
    "mov %rsp, %rcx\n"
    "sub $40, %rsp\n"
    "and $-16, %rsp\n"
    "call trap\n");

struct __attribute__((packed)) pointer {
  half limit;
  void *base;
};

/* Exceptions are printed; interrupts stay off. */
void own_descriptors(void)
{
  static word segments[] = {0, 0x00af9b000000ffff, 0x00cf93000000ffff};
  static struct { half low, segment, type, middle; dword high, zero; } gates[VECTORS];
  const struct pointer gdt = {sizeof segments - 1, segments}, idt = {sizeof gates - 1, gates};
  for (word vector = 0; vector < VECTORS; vector++) {
    word stub = (word)stubs + vector * STUB;
    gates[vector].low = stub;
    gates[vector].segment = CODE;
    gates[vector].type = 0x8e00;
    gates[vector].middle = stub >> 16;
    gates[vector].high = stub >> 32;
  }
  asm volatile("lgdt %0\n"
      "lidt %1\n"
      "pushq $8\n"
      "lea 1f(%%rip), %%rax\n"
      "pushq %%rax\n"
      "lretq\n"
      "1: mov $16, %%eax\n"
      "mov %%eax, %%ds\n"
      "mov %%eax, %%es\n"
      "mov %%eax, %%ss\n" :: "m"(gdt), "m"(idt) : "rax", "memory");
}
