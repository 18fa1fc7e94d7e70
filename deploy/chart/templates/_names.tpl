{{/* Name of what belongs to one release. A release may have dots in its name; a Service may not. */}}
{{- define "weir.name" -}}
{{- $name := .Release.Name | replace "." "-" }}
{{- if contains "weir" $name }}{{ $name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-weir" $name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels by which pods are found: they never change. Called with (list . "gateway"). */}}
{{- define "weir.selector" -}}
app.kubernetes.io/name: weir
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{- define "weir.secret" -}}
{{ .Values.secrets.existing | default (include "weir.name" .) }}
{{- end }}

{{/* A user without rights, and nothing of the machine. */}}
{{- define "weir.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "weir.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Name of the InferencePool whose pods are engines; empty: none. */}}
{{- define "weir.pool" -}}
{{- $fleet := .Values.policy.fleet | default dict -}}
{{- $fleet.inference_pool | default "" -}}
{{- end }}

{{/* What would run and be wrong. */}}
{{- define "weir.checked" -}}
{{- if and .Values.inferencePool.create (not (include "weir.pool" .)) -}}
{{- fail "inferencePool.create: name it in policy.fleet.inference_pool" -}}
{{- end -}}
{{- if and .Values.inferencePool.create (not .Values.inferencePool.selector) -}}
{{- fail "inferencePool.selector: labels of the pods that are its engines" -}}
{{- end -}}
{{- if and .Values.inferencePool.create (not .Values.inferencePool.picker) -}}
{{- fail "inferencePool.picker: an InferencePool names its endpoint picker: true" -}}
{{- end -}}
{{- if and .Values.inferencePool.picker .Values.policy.cluster -}}
{{- fail "inferencePool.picker: an endpoint picker is for one gateway, without policy.cluster" -}}
{{- end -}}
{{- $many := or .Values.autoscaling.enabled (gt (int .Values.gateway.replicas) 1) -}}
{{- $shared := int (dig "routing" "gateways" 1 .Values.policy) -}}
{{- if and .Values.autoscaling.enabled (not .Values.policy.cluster) -}}
{{- fail "autoscaling: gateways whose number changes need policy.cluster, so that one decides for all" -}}
{{- end -}}
{{- if and $many (not .Values.policy.cluster) (ne $shared (int .Values.gateway.replicas)) -}}
{{- fail (printf "gateway.replicas: %d gateways need policy.cluster, so that one decides for all, or policy.routing.gateways: %d" (int .Values.gateway.replicas) (int .Values.gateway.replicas)) -}}
{{- end -}}
{{- if and (eq (toString .Values.gateway.workers) "auto") (not (dig "resources" "limits" "cpu" "" .Values.gateway)) -}}
{{- fail "gateway.workers: auto is all cores of a node without gateway.resources.limits.cpu: give that, or a number" -}}
{{- end -}}
{{- $cpu := toString (dig "resources" "limits" "cpu" "" .Values.gateway) -}}
{{- $cores := hasSuffix "m" $cpu | ternary (div (int (trimSuffix "m" $cpu)) 1000) (int (float64 $cpu)) -}}
{{- $workers := eq (toString .Values.gateway.workers) "auto" | ternary (sub $cores 1) (int .Values.gateway.workers) -}}
{{- if and .Values.policy.cluster (lt (int $workers) 2) -}}
{{- fail "gateway.workers: a member of policy.cluster needs 2 or more; auto is one less than the cores of gateway.resources.limits.cpu" -}}
{{- end -}}
{{- if and .Values.sidecar.enabled $many (not .Values.policy.cluster) -}}
{{- fail "sidecar: a sidecar reports to whichever gateway the Service gives it, and only members of policy.cluster name the others" -}}
{{- end -}}
{{- if and .Values.sidecar.enabled (not .Values.sidecar.file.models) -}}
{{- fail "sidecar.file: name the models that may run, under models" -}}
{{- end -}}
{{- end }}
