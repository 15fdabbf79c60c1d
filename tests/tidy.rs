//! Checks the rules of `STYLE.md`. Each rule is one line here, one function over the parsed tree,
//! and examples that prove that it can fail.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use tree::{File, Finding, Tree};

#[path = "tidy/c.rs"]
mod c;
#[path = "tidy/direction.rs"]
mod direction;
#[path = "tidy/limits.rs"]
mod limits;
#[path = "tidy/papers.rs"]
mod papers;
#[path = "tidy/prose.rs"]
mod prose;
#[path = "tidy/rings.rs"]
mod rings;
#[path = "tidy/safety.rs"]
mod safety;
#[path = "tidy/suites.rs"]
mod suites;
#[path = "tidy/tree.rs"]
mod tree;
#[path = "tidy/words.rs"]
mod words;

type Rule = fn(&Tree) -> Vec<Finding>;

/// Makes a test of every rule: it must refuse the bad examples, accept the good ones, and find
/// nothing in this repository.
macro_rules! rules {
    ($($name:ident: $rule:path, refuses $bad:tt, accepts $good:tt;)*) => {
        /// All rules, which run over one parse of the tree.
        const RULES: &[(&str, Rule)] = &[$((stringify!($name), $rule)),*];
        $(#[test]
        fn $name() {
            prove($rule, &$bad, &$good);
            hold(stringify!($name));
        })*
    };
}

rules! {
    every_rust_file_parses: unparsed,
        refuses [rust("fn (")],
        accepts [rust("fn f() {}")];

    functions_are_short: limits::functions,
        refuses [rust(function(61)), file("vmm/src/machine.rs", build(91))],
        accepts [
            rust(function(60)),
            rust(function(60).replace("x();", "x();\n// why\n\n")),
            file("vmm/src/machine.rs", build(90)),
        ];
    files_are_short: limits::files,
        refuses [
            rust("//\n".repeat(601)),
            rust(test_module(2) + &"//\n".repeat(601)),
            rust(test_module(200)),
        ],
        accepts [
            rust("//\n".repeat(600)),
            rust(test_module(190) + &"//\n".repeat(600)),
            file("vmm/src/pci/test.rs", "//\n".repeat(601)),
        ];
    structs_have_few_fields: limits::fields,
        refuses [rust(fields(16))],
        accepts [
            rust(fields(15)),
            rust(format!("#[repr(C)] {}", fields(16))),
            rust(format!("#[repr(C, packed)] {}", fields(16))),
        ];
    traits_have_few_methods: limits::methods,
        refuses [rust(methods(8))],
        accepts [rust(methods(7))];
    functions_have_few_parameters: limits::parameters,
        refuses [
            rust(parameters(6)),
            rust(format!("impl S {{ {} }}", parameters(6))),
            rust("fn f(a: u8, b: u8, c: &(u8, (u8, u8)), d: u8) {}"),
        ],
        accepts [rust(parameters(5)), rust(format!("impl T for S {{ {} }}", parameters(6)))];
    error_enums_are_matched_not_collected: limits::variants,
        refuses [rust(variants("ReadError", 10))],
        accepts [rust(variants("ReadError", 9)), rust(variants("Register", 10))];
    lines_fit_the_width: limits::columns,
        refuses [
            rust(format!("// {}", "é".repeat(98))),
            file("tests/x.c", format!("/* {} */", "x".repeat(95))),
            file("tests/run", format!("#!/bin/sh\n# {}", "x".repeat(119))),
        ],
        accepts [
            rust(format!("// {}", "é".repeat(97))),
            file("tests/x.c", format!("/* {} */", "x".repeat(94))),
            rust(format!("// https://{}", "x".repeat(98))),
            file("list.txt", "x".repeat(101)),
        ];
    c_files_are_short: c::files,
        refuses [file("tests/x.c", "//\n".repeat(601)), file("tests/x.S", "nop\n".repeat(601))],
        accepts [file("tests/x.h", "//\n".repeat(600)), file("tests/x.txt", "x\n".repeat(601))];
    c_functions_are_short: c::functions,
        refuses [
            file("tests/x.c", c_function(61)),
            file("tests/x.c", format!("{}{}", c_function(1), c_function(61))),
        ],
        accepts [
            file("tests/x.c", c_function(60).repeat(2)),
            file("tests/x.h", format!("{}struct s {{\n    int x;\n}};\n", "int x;\n".repeat(61))),
            file("tests/x.c", c_function(60).replace("{\n", "{\n    /* a\n     * b */\n\n")),
        ];
    c_files_have_a_description: c::heads,
        refuses [file("tests/x.c", "int x;\n"), file("tests/x.h", "# 1\n")],
        accepts [file("tests/x.h", "/* x */\n"), file("tests/x.S", "# x\nnop\n")];
    dependencies_are_few: limits::crates,
        refuses [file("Cargo.lock", "source = \"x\"\n".repeat(172))],
        accepts [file("Cargo.lock", "source = \"x\"\n".repeat(171))];
    docs_are_short: limits::papers,
        refuses [file("STYLE.md", "x\n".repeat(151)), file("ARCHITECTURE.md", "x\n".repeat(201))],
        accepts [file("STYLE.md", "x\n".repeat(150)), file("ARCHITECTURE.md", "x\n".repeat(200))];

    no_lint_is_allowed: words::allow,
        refuses [
            rust("#[allow(dead_code)] fn f() {}"),
            rust("#![allow(dead_code)]"),
            rust("#[cfg_attr(test, allow(dead_code))] fn f() {}"),
            rust("macro_rules! m { () => { #[allow(dead_code)] fn f() {} } }"),
        ],
        accepts [rust("#[expect(dead_code, reason = \"x\")] fn f() { rules.allow(1); }")];
    no_todo_is_left: words::todo,
        refuses [
            rust("fn f() { todo!() }"),
            rust("fn f() { unimplemented!() }"),
            rust("// TODO: more"),
            file("deploy/x.yaml", "# FIXME"),
            file("README.md", "XXX later"),
        ],
        accepts [rust("// mktemp XXXXXX, TODOS"), file("STYLE.md", "`TODO`")];
    only_answers_are_printed: words::println,
        refuses [
            rust("fn f() { println!(); }"),
            file("devices/src/bus.rs", "fn f() { std::print!(\"x\"); }"),
        ],
        accepts [
            rust("fn f() { eprintln!(); writeln!(out); }"),
            file("vmm/src/main.rs", "fn f() { println!(); }"),
            file("vmm/build.rs", "fn f() { println!(); }"),
        ];
    code_has_no_features: words::cfg_feature,
        refuses [
            rust("#[cfg(feature = \"x\")] fn f() {}"),
            rust("#[cfg(all(test, feature = \"x\"))] fn f() {}"),
            rust("fn f() -> bool { cfg!(feature = \"x\") }"),
        ],
        accepts [rust("#[cfg(test)] fn f() {} #[cfg(target_arch = \"x86_64\")] fn g() {}")];
    crates_have_no_features: words::features,
        refuses [file("vmm/Cargo.toml", "[package]\n[features]\n")],
        accepts [file("vmm/Cargo.toml", "[dependencies]\nx = { features = [\"y\"] }\n")];
    no_test_is_ignored: words::ignore,
        refuses [
            rust("#[test] #[ignore] fn f() {}"),
            rust("mod test { #[test] #[ignore = \"slow\"] fn f() {} }"),
        ],
        accepts [rust("#[test] fn f() {}")];
    skips_are_counted: words::skips,
        refuses [
            rust("fn f() { eprintln!(\"not run: f: no x\"); }"),
            rust("fn f() { say(&format!(\"{test}: not run: no x\")); }"),
            rust("fn f() { log(\"not run here: f: no x\"); }"),
        ],
        accepts [
            rust("fn f() { skip::not_run(\"f\", \"there is no x\"); }"),
            rust("fn f() { fail(\"no x: Windows cannot run here: add x\"); }"),
            file("tests/skip/src/lib.rs", "fn f() { log(\"not run here: f: no x\"); }"),
        ];
    names_are_descriptive: words::names,
        refuses [
            file("vmm/src/device_manager.rs", ""),
            file("devices/src/util/mod.rs", ""),
            rust("mod helpers { }"),
        ],
        accepts [file("vmm/src/machine.rs", "mod xhci;"), file("devices/src/baseline.rs", "")];
    files_have_headings: words::headings,
        refuses [rust("fn f() {}"), rust("/// x\npub fn f() {}")],
        accepts [rust("//! x\npub fn f() {}")];

    unsafe_is_only_in_listed_files: safety::listed,
        refuses [
            rust("fn f() { unsafe { g() } }"),
            rust("macro_rules! m { () => { unsafe { g() } } }"),
            file("boot/src/acpi.rs", "unsafe impl Send for S {}"),
            file("vmm/src/kvm/fd.rs", "fn f() {}"),
        ],
        accepts [
            file("vmm/src/kvm/fd.rs", "fn f() { unsafe { g() } }"),
            file("vmm/probe/guest/src/main.rs", "fn f() { unsafe { g() } }"),
            file("vmm/probe/init/main.rs", "fn f() { unsafe { g() } }"),
            rust("// unsafe\nfn f() { log(\"unsafe\") }"),
        ];
    unsafe_is_forbidden_elsewhere: safety::forbidden,
        refuses [
            file("boot/src/lib.rs", "//! x"),
            file("tests/src/lib.rs", "//! x"),
            file("tests/boot_linux.rs", "#![deny(unsafe_code)]"),
        ],
        accepts [
            file("boot/src/lib.rs", "#![forbid(unsafe_code)]"),
            file("tests/guest/linux.rs", ""),
        ];
    unsafe_has_a_reason: safety::reasons,
        refuses [
            rust("fn f() {\n    // SAFETY: above another\n    g();\n    unsafe { h() }\n}"),
            rust("// SAFETY: too far\n\nunsafe impl Send for S {}"),
            rust("/// x\npub unsafe fn f() {}"),
        ],
        accepts [
            rust("fn f() {\n    // SAFETY: x lives\n    // as long.\n    unsafe { h() }\n}"),
            rust("fn f() {\n    // SAFETY: x\n    let y =\n        unsafe { h() };\n}"),
            rust("// SAFETY: x\nunsafe impl Send for S {}"),
        ];

    crates_depend_only_on_lower_crates: direction::crates,
        refuses [
            file("devices/src/bus.rs", "use kvm_ioctls::VmFd;"),
            file("devices/src/bus.rs", "use {std::io, boot as b};"),
            file("devices/src/bus.rs", "fn f() { log!(vmm::config::X) }"),
            file("boot/src/acpi.rs", "fn f() -> devices::bus::Bus {}"),
            file("boot/Cargo.toml", "[dependencies]\nkvm-bindings.workspace = true\n"),
            file("devices/Cargo.toml", "[dev-dependencies]\nboot = { path = \"x\" }\n"),
        ],
        accepts [
            file("devices/src/bus.rs", "use crate::{boot::x, vmm}; fn f() { let boot = 1; }"),
            file("vmm/src/machine.rs", "use boot::acpi; use devices::bus;"),
            file("devices/Cargo.toml", "[dependencies]\nvm-memory.workspace = true\n"),
        ];
    boot_has_no_side_effects: direction::boot_is_pure,
        refuses [
            file("boot/src/linux.rs", "use std::{fs::File, io};"),
            file("boot/src/linux.rs", "fn f() { std::fs::read(\"x\"); }"),
        ],
        accepts [
            file("boot/src/linux.rs", "use std::io::Cursor;"),
            file("boot/src/linux.rs", "#[cfg(test)]\nmod test { use std::fs; }"),
        ];
    devices_and_boot_meet_only_in_the_recipe: direction::both,
        refuses [file("vmm/src/vcpu.rs", "use boot::acpi; use devices::bus;")],
        accepts [
            file("vmm/src/vcpu.rs", "use devices::bus;"),
            file("vmm/src/machine.rs", "use boot::acpi; use devices::bus;"),
        ];
    a_vcpu_depends_only_on_the_bus: direction::vcpu_knows_the_bus,
        refuses [file("vmm/src/vcpu.rs", "use devices::{bus::Bus, platform::serial};")],
        accepts [file("vmm/src/vcpu.rs", "use devices::bus::{self, Bus};")];
    the_container_uses_few_interfaces: direction::doors,
        refuses [
            file("container/src/web.rs", "use vmm::{config, kvm::Vm};"),
            file("container/src/web.rs", "use devices::{board::Board, registry};"),
            file("container/src/web.rs", "fn f() -> devices::pci::Address {}"),
        ],
        accepts [
            file("container/src/web.rs", "use vmm::{config::Config, control::Client};"),
            file("container/src/pod.rs", "use devices::{nvme, registry, virtio::net};"),
        ];
    crates_have_no_cycle: rings::crates,
        refuses [manifests(&["a: b", "b: a"]), manifests(&["a: b", "b: c", "c: d", "d: e", "e:"])],
        accepts [manifests(&["a: b c d", "b: c", "c: d", "d:"])];
    modules_have_no_cycle: rings::modules,
        refuses [
            modules(&["x: use crate::y::Y;", "y: fn f() { super::x::g() }"]),
            modules(&["x/mod: use crate::y;", "x/z: use crate::x::v;", "x/v: use super::z::Z;"]),
        ],
        accepts [
            modules(&["x: mod a; use self::a::A;", "x/a: use super::X;"]),
            modules(&["x: use crate::y;", "y: #[cfg(test)]\nmod test { use crate::x; }"]),
        ];
    every_crate_has_the_lints: direction::lints,
        refuses [file("vmm/Cargo.toml", "[package]\n")],
        accepts [file("vmm/Cargo.toml", "[package]\n[lints]\nworkspace = true\n")];

    docs_name_existing_paths: papers::named_paths,
        refuses [
            file("README.md", "see `vmm/src/gone.rs`"),
            file("README.md", "see `GONE.md` and `./gone`"),
            file("README.md", "`tests/gone/x -- COMMAND`"),
            file("deploy/README.md", "see `deploy/{README,GONE}.md`"),
        ],
        accepts [
            file("README.md", "`README.md`, `vmm run`, `a/b`, `boot/<name>`, `boot: subject`"),
            file("README.md", "```text\n`vmm/src/gone.rs`\n```\n"),
            file("vmm/README.md", "`vmm/README.md:3` in `vmm/`"),
        ];
    links_resolve: papers::links,
        refuses [
            file("README.md", "[x](docs/gone.md)"),
            file("README.md", "# Here\n[x](#there)"),
            file("deploy/README.md", "[x](README/x.md)"),
        ],
        accepts [
            file("README.md", "# How it `works`, now\n[x](#how-it-works-now) [y](https://x.y/z)"),
            file("deploy/README.md", "[x](../deploy/README.md) [y](README.md)"),
        ];
    no_path_is_machine_specific: papers::machine_paths,
        refuses [
            file("README.md", concat!("cd /wo", "rk/main")),
            rust(concat!("const X: &str = \"/ho", "me/me\";")),
            file("try", concat!("x=/ro", "ot/.cargo")),
        ],
        accepts [
            file("README.md", concat!("deploy/wo", "rk/x ~/wo", "rk/y")),
            file("tests/lab/lab", concat!("mount /ro", "ot/proc")),
        ];
    prose_is_plain: prose::plain,
        refuses [
            rust("/// What is waited for.\nfn f() {}"),
            rust("// It is so. Whose byte it is.\n"),
            rust("/// It holds so many at most.\nfn f() {}"),
            rust("fn f() { log(\"whoever asks\") }"),
            rust("fn f() { log(\"the port is told to others\") }"),
        ],
        accepts [
            rust("/// The event of\n/// What we wait for.\nfn f() {}"),
            rust("/// Limit: so manyfold.\nfn f() { log(\"who: asked\") }"),
        ];
    suites_are_listed: suites::listed,
        refuses [
            suites(&["a | of a | - | 1"], &["tests/a.rs", "vmm/tests/b.rs"]),
            suites(&["a | of a | - | 1", "b | of b | - | 1"], &["tests/a.rs"]),
            suites(&["a | of a | lab | 1"], &["tests/a.rs"]),
            suites(&["a | of a | - | soon"], &["tests/a.rs"]),
            suites(&["a | of a | -"], &["tests/a.rs"]),
        ],
        accepts [suites(
            &["# comment", "", "a | of a | root, kvm | 0.1", "b | of b | - | 2"],
            &["tests/a.rs", "boot/tests/b/main.rs", "boot/tests/b/other.rs"],
        )];
    scripts_are_executable: papers::scripts,
        refuses [
            file("tests/lab/lab", "#!/bin/bash\n"),
            file("tests/lab/x.sh", "echo"),
            file("tests/lab/list", "a b c").executable(),
        ],
        accepts [
            file("tests/lab/lab", "#!/bin/bash\n").executable(),
            file("tests/lab/x.sh", "# shellcheck shell=bash\n"),
            file("tests/tidy.rs", "#![forbid(unsafe_code)]"),
        ];
}

fn unparsed(tree: &Tree) -> Vec<Finding> {
    tree.unparsed.clone()
}

/// Checks that the rule refuses each bad example and accepts each good one, as trees of their own.
fn prove<E: Example>(rule: Rule, bad: &[E], good: &[E]) {
    let findings = |files: Vec<File>| report(&rule(&Tree::of(files)));
    for example in bad {
        let files = example.files();
        assert_ne!(findings(files.clone()), "", "the rule accepts {}", shown(&files));
    }
    for example in good {
        let files = example.files();
        assert_eq!(findings(files.clone()), "", "the rule refuses {}", shown(&files));
    }
}

fn shown(files: &[File]) -> String {
    files.iter().map(|file| format!("{}:\n{}\n", file.path, file.text)).collect()
}

/// A small tree for a rule: one file, or several.
trait Example {
    fn files(&self) -> Vec<File>;
}

impl Example for File {
    fn files(&self) -> Vec<File> {
        vec![self.clone()]
    }
}

impl Example for Vec<File> {
    fn files(&self) -> Vec<File> {
        self.clone()
    }
}

/// Fails with the rule's findings in this repository, if there are any.
fn hold(name: &str) {
    static FOUND: OnceLock<Vec<(&str, Vec<Finding>)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let tree = Tree::here();
        assert!(tree.file("Cargo.toml").is_some(), "no Cargo.toml among the files: not the top");
        RULES.iter().map(|(name, rule)| (*name, rule(&tree))).collect()
    });
    let (_, findings) = found.iter().find(|(rule, _)| *rule == name).expect("the rule has run");
    assert!(findings.is_empty(), "\n{}", report(findings));
}

fn report(findings: &[Finding]) -> String {
    findings.iter().fold(String::new(), |mut text, finding| {
        writeln!(text, "{finding}").expect("a string takes everything");
        text
    })
}

/// The workspace, and the guests that are compiled without a manifest of their own.
#[test]
fn code_is_formatted() {
    let tree = Tree::here();
    let mut commands = Vec::new();
    for file in &tree.files {
        let path = tree::top().join(&file.path);
        if file.name() == "Cargo.toml" && file.text.contains("[workspace]") {
            let mut cargo = Command::new("cargo");
            cargo.args(["fmt", "--all", "--check", "--manifest-path"]).arg(path);
            commands.push(cargo);
        } else if file.path.starts_with("vmm/probe/") && file.name() == "main.rs" {
            let mut rustfmt = Command::new("rustfmt");
            rustfmt.args(["--check", "--edition", "2024"]).arg(path);
            commands.push(rustfmt);
        }
    }
    assert!(!commands.is_empty(), "no Cargo.toml with a workspace among the files");
    for mut command in commands {
        let output = command.output().expect("the formatter runs");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success(), "please run {command:?} without --check:\n{said}");
    }
}

#[test]
fn the_formatter_refuses_unformatted_code() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unformatted.rs");
    std::fs::write(&path, "fn  f( ) { }\n").expect("the target folder takes a file");
    let mut rustfmt = Command::new("rustfmt");
    let output = rustfmt.args(["--check", "--edition", "2024"]).arg(path).output();
    assert!(!output.expect("rustfmt runs").status.success());
}

fn file(path: &str, text: impl Into<String>) -> File {
    File::new(path, text)
}

/// A Rust file that no list of exceptions names.
fn rust(text: impl Into<String>) -> File {
    file("vmm/src/example.rs", text)
}

/// Manifests of crates: "a: b c" depends on b and c.
fn manifests(crates: &[&str]) -> Vec<File> {
    let manifest = |line: &&str| {
        let (name, used) = line.split_once(':').expect("a name");
        let used: String =
            used.split_whitespace().map(|used| format!("{used}.workspace = true\n")).collect();
        let text = format!("[package]\nname = \"{name}\"\n[dependencies]\n{used}");
        file(&format!("{name}/Cargo.toml"), text)
    };
    crates.iter().map(manifest).collect()
}

/// A table of suites, and files of integration tests.
fn suites(rows: &[&str], files: &[&str]) -> Vec<File> {
    let table = file("tests/suites", rows.join("\n"));
    [table].into_iter().chain(files.iter().map(|path| file(path, ""))).collect()
}

/// The modules of a crate: "a/b: text".
fn modules(files: &[&str]) -> Vec<File> {
    let module = |line: &&str| {
        let (path, text) = line.split_once(": ").expect("a path");
        file(&format!("vmm/src/{path}.rs"), text)
    };
    [file("vmm/src/lib.rs", "")].into_iter().chain(files.iter().map(module)).collect()
}

fn function(lines: usize) -> String {
    format!("fn f() {{\n{}}}\n", "x();\n".repeat(lines))
}

fn c_function(lines: usize) -> String {
    format!("int f(void)\n{{\n{}}}\n", "    x();\n".repeat(lines))
}

fn build(lines: usize) -> String {
    function(lines).replace("fn f", "fn build")
}

fn test_module(lines: usize) -> String {
    format!("#[cfg(test)]\nmod test {{\n{}}}\n", "//\n".repeat(lines))
}

/// `count` copies of `piece`, with their numbers in place of `#`.
fn numbered(count: usize, piece: &str) -> String {
    (0..count).map(|number| piece.replace('#', &number.to_string())).collect()
}

fn fields(count: usize) -> String {
    format!("struct S {{ {} }}", numbered(count, "f#: u8, "))
}

fn methods(count: usize) -> String {
    format!("trait T {{ {} }}", numbered(count, "fn f#(); "))
}

fn parameters(count: usize) -> String {
    format!("fn f({}) {{}}", numbered(count, "p#: u8, "))
}

fn variants(name: &str, count: usize) -> String {
    format!("enum {name} {{ {} }}", numbered(count, "V#, "))
}
