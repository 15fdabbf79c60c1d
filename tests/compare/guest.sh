#!/bin/busybox sh
# What a Linux guest sees of its machine, as base64 of a tar.gz between two lines. CPUID is read as the
# module `cpuid` gives it: at an offset that is the leaf, with the subleaf above it, 16 bytes per leaf from there on.
cd /tmp || exit 1
mkdir -p seen/acpi seen/cpuid seen/pci seen/smbios
for table in /sys/firmware/acpi/tables/*; do
  [ -d "$table" ] || cp "$table" seen/acpi/
done
cp /sys/firmware/dmi/tables/* seen/smbios/
for function in /sys/bus/pci/devices/*; do
  mkdir "seen/pci/${function##*/}"
  cp "$function/config" "$function/resource" "seen/pci/${function##*/}/"
done
# leaves CPU FIRST COUNT SUBLEAVES
leaves() {
  subleaf=0
  while [ $subleaf -lt "$4" ]; do
    dd if="/dev/cpu/$1/cpuid" bs=$(($3 * 16)) count=1 iflag=skip_bytes skip=$((subleaf << 32 | $2)) 2> /dev/null
    subleaf=$((subleaf + 1))
  done
}
for cpu in /dev/cpu/[0-9]*; do
  cpu=${cpu##*/}
  {
    leaves "$cpu" 0 32 19
    leaves "$cpu" 0x40000000 16 1
    leaves "$cpu" 0x40000100 2 1
    leaves "$cpu" 0x80000000 48 6
  } > "seen/cpuid/$cpu"
done
dmesg > seen/dmesg
echo ">>>seen begin"
tar c -C seen . | gzip -9 | base64
echo ">>>seen end"
